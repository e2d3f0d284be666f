"""Role of the launcher, taken by one process after the other, or by none for a while. Decides, no I/O."""

from __future__ import annotations

from enum import Enum


class RoleState(Enum):
    """State of the launcher's role, as an agent sees it."""

    #: a launcher is there
    HERE = "here"
    #: the launcher was lost, and processes go on
    ORPHANED = "orphaned"
    #: everything ends
    ENDING = "ending"


class LauncherRole:
    """The launcher's role, which has a generation: an agent obeys one of them, and none that is older.

    Args:
        generation: of the first launcher.

    Attributes:
        state: who is there.
        generation: of the launcher that is obeyed, or was last.
        continues: processes go on when the launcher is lost.
    """

    def __init__(self, generation: int = 0, *, state: RoleState = RoleState.HERE) -> None:
        self.state, self.generation, self.continues = state, generation, False

    def claim(self, generation: int) -> tuple[bool, str]:
        """Decide whether a launcher is obeyed from now on; and why."""
        if self.state is RoleState.ENDING:
            return False, "the agent is ending"
        if generation <= self.generation:
            return False, f"launcher {generation} comes after launcher {self.generation}, which has taken its place"
        before, self.generation, self.state = self.state, generation, RoleState.HERE
        return True, f"launcher {generation} takes the place of a lost one" if before is not self.state else "another"

    def lose(self, *, has_processes: bool) -> tuple[bool, str]:
        """Decide whether processes go on without a launcher; and why."""
        if self.state is RoleState.ENDING:
            return False, "the agent is ending"
        if self.continues and has_processes:
            self.state = RoleState.ORPHANED
            return True, "--on-launcher-loss continue"
        self.state = RoleState.ENDING
        return False, "nothing runs here" if not has_processes else "--on-launcher-loss stop"

    def end(self) -> None:
        """Take note that everything ends."""
        self.state = RoleState.ENDING
