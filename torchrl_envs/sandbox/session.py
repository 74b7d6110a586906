"""Session of a sandbox: an interpreter whose variables live on between runs."""

import threading
import time

from .process import SandboxProcess
from .result import SandboxResult
from .sandbox import Sandbox


class SandboxSession:
    """Runs programs one after the other in one interpreter, isolated as a sandbox's runs are.

    A run that hits its deadline or the memory limit ends the interpreter, with all its processes;
    so does a program that kills it. Then ``state_lost`` is set, and the next run starts afresh.
    ``sys.exit`` ends the run alone. Memory and disk are those of the whole session.

    The interpreter itself says when a run is over. A program that looks for it can say so early,
    for its own session; what grades programs uses :meth:`Sandbox.run`, where the kernel says it.

    Args:
        sandbox: how the session is isolated and limited.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._process: SandboxProcess | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["SandboxSession"], tuple[Sandbox]]:
        """A copy starts afresh."""
        return type(self), (self.sandbox,)

    def run(self, code: str, *, timeout_s: float | None = None) -> SandboxResult:
        """Run a program where the last one stopped.

        Args:
            code: a Python program.
            timeout_s: deadline, in seconds; that of the sandbox's limits by default.

        Returns:
            Its output; ``exit_status`` is 1 after an exception.

        Raises:
            ValueError: the program is longer than the limits allow.
            SandboxStartError: the sandbox did not start.
        """
        timeout_s = self.sandbox.limits.timeout_s if timeout_s is None else timeout_s
        request = self.sandbox.request(code, timeout_s)
        with self._lock:
            started = time.monotonic()
            process = self._process
            if process is None:
                process = self._process = self.sandbox.start(persistent=True)
                try:
                    process.await_start()
                except BaseException:
                    self._end()
                    raise
            process.clear_output()
            process.send(request)
            report = process.next_report(timeout_s=timeout_s)
            lost = not report.startswith("done ")
            if lost:
                self._end()
            return self.sandbox.result(process, report, started=started, state_lost=lost)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the interpreter; a later run starts a new one."""
        with self._lock:
            self._end()
