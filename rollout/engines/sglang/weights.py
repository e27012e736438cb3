"""One update of a server's weights, in as many calls as it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.engines.sglang.calls import ControlCalls
from rollout.errors import EngineError, EngineRefused

DEFAULT_GROUP = "weight_update_group"


class WeightUpdate:
    """What `SGLangControl.weight_update` hands out: an open update."""

    def __init__(self, calls: ControlCalls, *, has_sessions: bool) -> None:
        self._calls = calls
        self._has_sessions = has_sessions
        self._open = False
        self.touched = False
        """Whether the server may hold other weights than before."""

    async def from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str = DEFAULT_GROUP,
        load_format: str | None = None,
    ) -> None:
        """Receive and load tensors that rank 0 of the group broadcasts in this order.

        Dtypes are torch's names ("bfloat16"). It answers when all have come: broadcast beside it.
        """
        request: dict[str, Any] = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "flush_cache": False,  # once, at the end
        }
        if load_format is not None:
            request["load_format"] = load_format
        self.touched = True
        await self._calls.change("/update_weights_from_distributed", request)

    async def begin(self) -> None:
        if not self._has_sessions:
            return
        self._open = True
        try:
            await self._calls.change("/begin_weight_update", {})
        except EngineRefused as error:
            self._open = False  # another's session, perhaps: not ours to end
            if "already open" in str(error):
                error.args = (
                    f"{error}; another trainer is loading, or one died: then POST "
                    "/end_weight_update and load all weights again",
                )
            raise

    async def end(self) -> None:
        if self._open:
            await self._calls.change("/end_weight_update", {})
            self._open = False

    async def abandon(self, error: BaseException, version: str) -> None:
        """End the session, and give weights that may be half new a version of their own."""
        with noted(error, "the weight update session may still be open: POST /end_weight_update"):
            await self.end()
        if self.touched:
            await mark_incomplete(self._calls, error, version)


async def mark_incomplete(calls: ControlCalls, error: BaseException, version: str) -> None:
    """Give weights that are perhaps half of `version` a version of their own, noted on `error`."""
    incomplete = f"{version}-incomplete"
    with noted(error, "the weights may be half new, and still have the old version"):
        await calls.set_weight_version(incomplete, abort_all=False)
        error.add_note(f"the weights may be half new, as version {incomplete!r}: load all of them")


class noted:
    """Turns an `EngineError` in the block into a note on `error`, which is the one to be raised."""

    def __init__(self, error: BaseException, meaning: str) -> None:
        self._error, self._meaning = error, meaning

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> bool:
        if not isinstance(error, EngineError):
            return False
        self._error.add_note(f"{self._meaning} ({error})")
        return True
