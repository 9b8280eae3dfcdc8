"""The parent's end of the pipe to a `peer_worker.py`."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
from typing import Any

WORKER = pathlib.Path(__file__).with_name("peer_worker.py")
# An answer of the worker, among what libraries print.
MARK = "peer-answer: "
_PATIENCE_SECONDS = 600
_GOODBYE_SECONDS = 5


class PeerFailedError(Exception):
    """The peer failed; the message is its last word."""


class PeerAbsentError(Exception):
    """The peer cannot run here, and that is no fault."""


class PeerProcess:
    """A peer of a workload in a process of its own.

    It starts to import its framework at once; `answer` waits for that.

    Args:
        workload: Name of the workload.
        peer: Name of the peer.
    """

    def __init__(self, workload: str, peer: str) -> None:
        # Closed by `stop`.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        environment = os.environ | {
            "TF_CPP_MIN_LOG_LEVEL": "3",
            # Otherwise the first process takes all memory of a GPU.
            "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        }
        self._process = subprocess.Popen(
            [sys.executable, WORKER, workload, peer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            # Ctrl-C is for the parent alone, which then stops its children.
            start_new_session=True,
        )

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Sends a command and waits for the answer."""
        message = json.dumps({"command": command, **arguments}) + "\n"
        # An error: it is dead; why, `answer` finds out.
        with contextlib.suppress(OSError):
            self._pipe("stdin").write(message.encode())
            self._pipe("stdin").flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Waits for an answer.

        Raises:
            PeerAbsentError: If the peer cannot run here.
            PeerFailedError: If it says that it failed, ends or hangs.
        """
        late = threading.Timer(_PATIENCE_SECONDS, self._process.kill)
        late.start()
        try:
            for line in self._pipe("stdout"):
                _, mark, text = line.decode(errors="replace").partition(MARK)
                if mark:
                    return self._checked(json.loads(text))
        finally:
            # Joined, so that it has either killed the process or never will.
            late.cancel()
            late.join()
        code = self._process.wait()
        raise PeerFailedError(self._epitaph(code))

    def _checked(self, answer: dict[str, Any]) -> dict[str, Any]:
        if "absent" in answer:
            raise PeerAbsentError(answer["absent"])
        if "error" in answer:
            raise PeerFailedError(answer["error"])
        return answer

    def _epitaph(self, code: int) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        lines = [line.strip() for line in lines if line.strip()]
        last = lines[-1] if lines else "it left no message"
        if code == -signal.SIGKILL:
            return f"was killed, out of memory or hanging? {last}"
        return f"ended with {code}: {last}"

    def release(self) -> None:
        """Lets the process end: the end of its input tells it to quit."""
        # An error: it is dead already, with a command unread.
        with contextlib.suppress(OSError):
            self._pipe("stdin").close()

    def kill(self) -> None:
        """Ends the process at once."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ends the process, kindly at first, and forgets it."""
        self.release()
        try:
            self._process.wait(_GOODBYE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._pipe("stdout").close()
        self._errors.close()

    def _pipe(self, name: str) -> Any:
        return getattr(self._process, name)
