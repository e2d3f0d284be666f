"""Views of an elastic job: who is in it, decided anew for each epoch. State machines: no I/O, no clock, no threads.

`record.View` is what is agreed: members in rank order, voters, and the step at which they begin. `messages` has the
protocol in letters, `paxos` the agreement, `planning` what is proposed. A process has one of two state machines, which
take events and return actions (`events` has both):

* `candidate.ElasticCandidate`, from a process's start until a view has it (`JoinView`),
* `member.ElasticMember`, from then on; in the first view from the start.

How to drive them:

a. One thread owns the state machine. It calls ``handle(event)`` for each event, one after the other, and carries out
   the actions in their order before it handles the next event. Actions that take time are begun, and their ends are
   events: `RevokePlane` - `PlaneRevoked`, `BuildLayouts` - `LayoutsBuilt`, `RollTo` - `Rolled`, `StartTimer` -
   `TimerFired`, `KillMember` - `Evidence` by the pidfd. An end that comes when a view has passed is ignored.
b. Frames and doorbells of the planes carry the epoch of the view that `RunView` named. What carries an older one is
   dropped, and answered with `messages.ViewDecided`; what carries a newer one waits until this process runs that view.
   What is written to memory carries no epoch that a reader could look at: that is why processes of this host that were
   left out are killed before `BuildLayouts`, and why `UseFreshSegments` must unmap what they have mapped.
c. `RevokePlane` must be over before `PlaneRevoked` says how far this member is: what it applies, sends or writes after
   that would be missing in what the leader plans. Held sums are kept until `RollTo`, whatever else is built meanwhile.
d. `SendTo` may lose messages; everything is asked again. A member's address is in the view, or in its `MemberReady`.
e. A host's voter is a `paxos.Acceptor` where the agent is, or, without an agent, in the process of the lowest local
   rank that lives. ``handle`` returns the next acceptor and a reply: the acceptor is written by `slots.encode_slot` to
   memory that all local ranks map, and only then the reply is sent. A voter that has lost this memory is another one
   (`record.VoterId`), and votes from the next view on.
f. A candidate's state is that of a step which its source knows to be stable: some collective of the step behind has
   ended there. `Copied` comes after the digests were compared.
g. `StepApplied` is handled after every step. It costs one call while nothing is to change.

What is true of all of it together is tested by `tests/unit/cluster/views_simulator.py` and `views_search.py`.
"""
