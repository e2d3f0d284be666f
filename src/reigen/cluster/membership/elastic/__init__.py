"""Elastic members as real processes: the state machines of `views` with a thread, connections, timers and a voter.

* `node.ElasticNode`: a process, where it listens, and its host's voter.
* `directory`: how the first members find each other at the launcher's rendezvous, and candidates the members.
* `driver.ViewDriver`: drives the state machine, and tells the process what to do by a `plane.ViewPlane`.
* `links.MemberLinks`: connections between members, and evidence of deaths.
* `voter_memory.VoterMemory`: what a host has promised, in memory that all its processes have open.

How a process uses it:

a. It makes an `ElasticNode` and a `ViewDriver`. The first members call `directory.meet_first_view`, then
   `ViewDriver.begin`; a process that comes later, `ViewDriver.wait_for_view`.
b. The driver calls `build`, `roll` and `run` of the plane for each view, and `revoke` when one ends.
c. After each step the process calls `step_applied`; True means that the view ends here. Where a collective fails, it
   calls `request_change`: nothing happens if the view has passed meanwhile.
d. When its program is done: `finish`, then `close`. When it is to go: `leave`; the plane's `end` is called then.

What is different from what `views` demands: each view has connections and memory of its own, so there are no frames and
no writes of an older epoch that could take effect, and `UseFreshSegments` asks for nothing. Processes of this host that
a view leaves out are killed nevertheless: they would keep memory and devices for themselves.
"""
