"""Where the wall time of a run goes."""

import os
import pathlib
import time

from fashion_oct.timing import TimingSummary


class Ledger:
    """Every second since the start of the process is in exactly one entry.

    A run that goes on adds its seconds to those of the processes before it, up to their last checkpoint.

    Attributes:
      seconds: by name, in the order of the run.
    """

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic() - _seconds_since_process_start()

    def lap(self, name: str) -> None:
        """Books the time since the last lap under `name`."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def go_on(self, earlier: dict[str, float]) -> None:
        """Adds what the processes before this one have spent."""
        names = {**earlier, **self.seconds}
        self.seconds = {name: earlier.get(name, 0.0) + self.seconds.get(name, 0.0) for name in names}

    def with_fit(self, timing: TimingSummary, seconds_of_callbacks: dict[str, float]) -> dict[str, float]:
        """Returns all entries, with the time since the last lap booked as that of `fit`, by the callbacks' figures.

        Args:
          timing: of the whole run, the processes before this one included.
          seconds_of_callbacks: of this process, by their names in the ledger.
        """
        names = ["tracing", "steps", "validation", *seconds_of_callbacks, "fit, other"]
        fit_seconds = time.monotonic() - self._last + sum(self.seconds.get(name, 0.0) for name in names)
        # the discarded executions do steps, too: what they take beyond the usual is tracing
        tracing = timing.first_step_seconds or 0.0
        if usual := timing.step_seconds:
            num_timed = timing.num_steps - timing.num_discarded_steps
            tracing = timing.total_seconds - num_timed * usual["mean"] - timing.num_discarded_steps * usual["p50"]
        tracing = max(tracing, 0.0)
        parts = {"tracing": tracing, "steps": timing.total_seconds - tracing, "validation": timing.validation_seconds}
        parts |= {name: value + self.seconds.get(name, 0.0) for name, value in seconds_of_callbacks.items()}
        before = {name: value for name, value in self.seconds.items() if name not in names}
        return before | parts | {"fit, other": fit_seconds - sum(parts.values())}

    def lap_fit(self, timing: TimingSummary, seconds_of_callbacks: dict[str, float]) -> None:
        """Books the time since the last lap as that of `fit`; see `with_fit`."""
        self.seconds, self._last = self.with_fit(timing, seconds_of_callbacks), time.monotonic()


def _seconds_since_process_start() -> float:
    """Returns the age of this process; where the system does not tell (only Linux does), 0."""
    try:
        ticks = float(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # field 22: starttime
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return 0.0
