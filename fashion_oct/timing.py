"""Times the steps of Keras `fit`: what a step costs, how many images a second, and where the wall time went.

Imports only the standard library and TensorFlow, so that this file can be copied into any project. Works with
Keras 2.12 and later, tf-keras (set TF_USE_LEGACY_KERAS=1 before TensorFlow is imported) and Keras 3 on TensorFlow.

    time_history = TimeHistory(global_batch_size=512, log_throughput=True)
    with time_history:  # optional: counts what fit does before and after its callbacks, too
        model.fit(dataset, epochs=5, callbacks=[time_history])
    print(time_history.summary().images_per_second)
"""

import bisect
import collections
import dataclasses
import itertools
import math
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class TimingSummary:
    """What one `fit` took. All times in seconds; `dataclasses.asdict` gives a dict that JSON takes.

    The first execution traces the graph and is slow. *Timed* steps are those after the discarded ones: only they
    count for `images_per_second` and `step_seconds`, which are None where no step was timed.

    Attributes:
      num_replicas: copies of the model that train in sync.
      per_replica_batch_size: images of a step on one replica (on the fullest one where they do not divide evenly).
      global_batch_size: images of a step on all replicas.
      num_steps: steps of the whole `fit`, the discarded ones included.
      num_discarded_steps: steps at the start that were not timed; whole executions, so perhaps more than asked for.
      first_step_seconds: the first execution, tracing included; None before it has ended.
      total_seconds: every step, the first included.
      images_per_second: timed steps x global_batch_size / their seconds. A short last batch counts as a full one.
      step_seconds: mean, p50, p90, p99 and max of the timed steps. An execution of k steps counts as k steps of a
        k-th of its seconds each. Percentiles interpolate linearly: `numpy.percentile` of the list of all timed steps.
      validation_seconds: from `on_test_begin` to `on_test_end`, inside `fit`.
      other_seconds: the rest of `fit`: other callbacks, checkpoints, iterators, the building of model and metrics.
      fit_seconds: wall time of `fit` = total_seconds + validation_seconds + other_seconds.
    """

    num_replicas: int
    per_replica_batch_size: int
    global_batch_size: int
    num_steps: int
    num_discarded_steps: int
    first_step_seconds: float | None
    total_seconds: float
    images_per_second: float | None
    step_seconds: dict[str, float] | None
    validation_seconds: float
    other_seconds: float
    fit_seconds: float


class TimeHistory(tf.keras.callbacks.Callback):
    """Keras callback that times every execution of the train function. It prints nothing.

    An execution is timed around the call of `model.train_function` itself, until its logs have come back from the
    device. The wait for input is part of it; other callbacks, wherever they stand in the list, validation and
    checkpoints are not. A loop of one's own calls the hooks by hand; then a step lasts from `on_train_batch_begin`
    to `on_train_batch_end`, which should be given the step's logs, so that it can wait for the device.

    The wall time of `fit` begins when Keras hands over the model and ends with `on_train_end`. What Keras does before
    (adapt the data, some milliseconds to a tenth of a second; Keras 3 under a strategy: read a batch and build the
    model, which may take seconds) and what other callbacks do in `on_train_end` after this one is counted only inside
    a `with time_history:` block: use it where the sum must be the wall time of a short `fit`.

    Every `fit` starts afresh, unless `go_on` was called before it. After one that raised, the figures are those of the
    steps that ended.

    Attributes:
      times: seconds of each execution of this `fit`.
      steps: number of steps of each execution, parallel to `times`.
    """

    def __init__(
        self,
        global_batch_size: int,
        *,
        num_discarded_steps: int = 1,
        log_throughput: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Makes a callback for any number of `fit` calls, one after the other.

        Args:
          global_batch_size: images of a step, over all replicas.
          num_discarded_steps: steps at the start of each `fit` that are not timed, rounded up to whole executions;
            1 discards the first execution, which traces; 0 times everything.
          log_throughput: adds `images_per_second` of the epoch's timed steps (NaN without any) to the epoch's logs,
            for Keras' history and progress bar and for the callbacks that come later in the list.
          clock: returns seconds.

        Raises:
          ValueError: global_batch_size is no whole number above 0, or num_discarded_steps none of 0 or above.
        """
        super().__init__()
        _check_whole_number("global_batch_size", global_batch_size, at_least=1, remedy="count the images of one step")
        _check_whole_number("num_discarded_steps", num_discarded_steps, at_least=0, remedy="0 times every step")
        self.global_batch_size = int(global_batch_size)
        self.num_discarded_steps = int(num_discarded_steps)
        self.log_throughput = log_throughput
        self._clock = clock
        self._entered = False
        self._has_fit = False  # whether the `with` block has had a fit
        self._fit_follows_at: float | None = None  # when the fit that on_train_begin will announce has begun
        self._next_earlier: dict[str, Any] = {}  # figures that the next fit adds to
        self._reset(begin=0.0)

    def _reset(self, *, begin: float) -> None:
        """Forgets the fit before; the lists are new ones, so that who kept the old ones keeps their figures."""
        self.times: list[float] = []
        self.steps: list[int] = []
        self._executions: collections.deque[tuple[int, float]] = collections.deque()  # (first batch, seconds)
        self._earlier: dict[str, Any] = {}
        self._begin = self._last_seen = begin
        self._validation_seconds = 0.0
        self._num_steps = 0
        self._num_discarded_executions = 0
        self._num_replicas = 1
        self._epoch_start = 0
        self._updates_before: int | None = None  # updates that are no steps of this fit, by the optimizer's counter
        self._batch: int | None = None
        self._in_fit = False

    def __enter__(self) -> "TimeHistory":
        self._entered, self._has_fit = True, False
        self._fit_follows_at = self._clock()
        return self

    def __exit__(self, *exception: object) -> None:
        self._entered = False
        if self._has_fit:
            self._end_fit()
        self._fit_follows_at = None

    def summary(self) -> TimingSummary:
        """Returns the figures of the last `fit`, or of the present one up to the last hook of this callback."""
        state = self.state()
        times, steps = state["timed_seconds"], state["timed_steps"]
        timed_seconds = math.fsum(times)
        total_seconds = timed_seconds + state["discarded_seconds"]
        return TimingSummary(
            num_replicas=self._num_replicas,
            per_replica_batch_size=-(-self.global_batch_size // self._num_replicas),  # rounded up: 65 = 33 + 32
            global_batch_size=self.global_batch_size,
            num_steps=sum(steps) + state["num_discarded_steps"],
            num_discarded_steps=state["num_discarded_steps"],
            first_step_seconds=state["first_step_seconds"],
            total_seconds=total_seconds,
            images_per_second=sum(steps) * self.global_batch_size / timed_seconds if timed_seconds else None,
            step_seconds=_step_statistics(times, steps) if times else None,
            validation_seconds=state["validation_seconds"],
            other_seconds=state["fit_seconds"] - total_seconds - state["validation_seconds"],
            fit_seconds=state["fit_seconds"],
        )

    def state(self) -> dict[str, Any]:
        """Returns the figures so far in a form that JSON takes: what `go_on` wants, in this process or another one."""
        first, earlier = self._num_discarded_executions, self._earlier
        return {
            "timed_seconds": [*earlier.get("timed_seconds", []), *self.times[first:]],
            "timed_steps": [*earlier.get("timed_steps", []), *self.steps[first:]],
            "discarded_seconds": earlier.get("discarded_seconds", 0.0) + math.fsum(self.times[:first]),
            "num_discarded_steps": earlier.get("num_discarded_steps", 0) + sum(self.steps[:first]),
            "first_step_seconds": earlier.get("first_step_seconds") or (self.times[0] if self.times else None),
            "validation_seconds": earlier.get("validation_seconds", 0.0) + self._validation_seconds,
            "fit_seconds": earlier.get("fit_seconds", 0.0) + self._last_seen - self._begin,
        }

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Has the next `fit` add its figures to these, for a run that takes several `fit` calls or processes.

        Args:
          state: from `state()`.
        """
        num_replicas, begin = self._num_replicas, self._last_seen
        self._reset(begin=begin)
        self._num_replicas = num_replicas
        if self._entered and self._has_fit:  # the time until the next fit, or the end of the block, counts
            self._fit_follows_at = begin
        self._earlier = self._next_earlier = dict(state)

    # The hooks, in the order in which fit calls them. Keras 3 passes `logs` by keyword.

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self._in_fit = False
        if not self._entered or self._fit_follows_at is None:
            self._fit_follows_at = self._clock()
        self._stop_timing()  # what a fit that raised has left behind

    def on_train_begin(self, logs: Mapping | None = None) -> None:
        now = self._clock()
        self._reset(begin=now if self._fit_follows_at is None else self._fit_follows_at)
        self._earlier, self._next_earlier = self._next_earlier, {}
        self._last_seen = now
        self._fit_follows_at, self._has_fit = None, True
        self._in_fit = True
        strategy = getattr(self.model, "distribute_strategy", None) or tf.distribute.get_strategy()
        self._num_replicas = strategy.num_replicas_in_sync
        if getattr(self.model, "train_function", None) is not None:
            # fit looks this attribute up at every execution, on Keras 2 and 3
            self.model.train_function = self._timed(self.model.train_function)

    def on_epoch_begin(self, epoch: int, logs: Mapping | None = None) -> None:
        self._epoch_start = len(self.times)
        updates = _num_updates(self.model)
        self._updates_before = None if updates is None else updates - self._num_steps

    def on_train_batch_begin(self, batch: int, logs: Mapping | None = None) -> None:
        self._batch = batch
        self._batch_begin = self._clock()

    def on_train_batch_end(self, batch: int, logs: Mapping | None = None) -> None:
        if self._executions:
            first_batch, seconds = self._executions.popleft()
        else:  # a loop of one's own: no train function was called
            _wait_for_device(logs)
            assert self._batch is not None  # no train function has taken it
            first_batch, seconds = self._batch, self._clock() - self._batch_begin
        num_steps = self._count_steps(first_batch, batch)
        self._num_discarded_executions += self._num_steps < self.num_discarded_steps
        self._num_steps += num_steps
        self.times.append(seconds)
        self.steps.append(num_steps)
        self._last_seen = self._clock()

    def on_test_begin(self, logs: Mapping | None = None) -> None:
        self._test_begin = self._clock()

    def on_test_end(self, logs: Mapping | None = None) -> None:
        if self._in_fit:
            self._last_seen = self._clock()
            self._validation_seconds += self._last_seen - self._test_begin

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if self.log_throughput and logs is not None:
            throughput = self._images_per_second(max(self._epoch_start, self._num_discarded_executions))
            logs["images_per_second"] = math.nan if throughput is None else throughput
        self._last_seen = self._clock()

    def on_train_end(self, logs: Mapping | None = None) -> None:
        self._end_fit()

    def _end_fit(self) -> None:
        self._stop_timing()
        self._in_fit = False
        self._last_seen = self._clock()

    def _timed(self, train_function: Callable) -> Callable:
        """Returns `train_function` with a stopwatch; `_stop_timing` takes it off again."""

        def timed(iterator: Any) -> Any:
            batch, self._batch = self._batch, None
            if batch is None:  # train_on_batch of another callback: no step of this fit
                return train_function(iterator)
            begin = self._clock()
            logs = train_function(iterator)
            _wait_for_device(logs)
            # A queue, since Keras 3 calls on_train_batch_end in a thread where callbacks= is no list.
            self._executions.append((batch, self._clock() - begin))
            return logs

        timed.untimed = train_function  # type: ignore[attr-defined]  # functions do take attributes
        return timed

    def _stop_timing(self) -> None:
        while hasattr(getattr(self.model, "train_function", None), "untimed"):
            self.model.train_function = self.model.train_function.untimed

    def _count_steps(self, first_batch: int, last_batch: int) -> int:
        """Returns how many steps the execution from `first_batch` to `last_batch` (by the hooks' numbers) had.

        Keras 3 numbers the last execution of an epoch as if it were a full one. With 8 steps an execution, 20 steps
        an epoch end at batch 23: 4 steps where the data ended, but 8 where a repeated dataset goes on beyond
        `steps_per_epoch`. Only the optimizer's counter tells, and it is read only for such an execution.
        """
        num_steps = last_batch - first_batch + 1
        steps_an_epoch = (getattr(self, "params", None) or {}).get("steps")
        if num_steps == 1 or (steps_an_epoch and last_batch < steps_an_epoch):
            return num_steps
        updates = _num_updates(self.model)
        if updates is not None and self._updates_before is not None:
            counted = updates - self._updates_before - self._num_steps
            if 1 <= counted <= num_steps:
                return counted
        return min(num_steps, steps_an_epoch - first_batch) if steps_an_epoch else num_steps

    def _images_per_second(self, first_execution: int) -> float | None:
        seconds = math.fsum(self.times[first_execution:])
        return sum(self.steps[first_execution:]) * self.global_batch_size / seconds if seconds else None


def _check_whole_number(name: str, value: Any, *, at_least: int, remedy: str) -> None:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name} is {value!r}, but must be a whole number of at least {at_least}: {remedy}.")


def _wait_for_device(logs: Any) -> None:
    """Reads one tensor of `logs`, if there is any: it is there only when the device has done the step."""
    for value in tf.nest.flatten(logs):
        if hasattr(value, "numpy"):
            value.numpy()
            return


def _num_updates(model: Any) -> int | None:
    """Returns how many updates the optimizer has counted, or None where it does not count."""
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # under a LossScaleOptimizer
    # not the public `iterations`: under gradient accumulation that counts only every k-th step
    counter = getattr(optimizer, "_iterations", None)
    return None if counter is None else int(counter.numpy())


def _step_statistics(times: Sequence[float], steps: Sequence[int]) -> dict[str, float]:
    """Returns mean, p50, p90, p99 and max of the seconds a step; see `TimingSummary.step_seconds`."""
    pairs = sorted((seconds / num_steps, num_steps) for seconds, num_steps in zip(times, steps, strict=True))
    ends = list(itertools.accumulate(num_steps for _, num_steps in pairs))

    def percentile(percent: float) -> float:
        position = percent / 100 * (ends[-1] - 1)  # among the steps, sorted: 0, 1, ... ends[-1] - 1
        below = pairs[bisect.bisect_right(ends, math.floor(position))][0]
        above = pairs[bisect.bisect_right(ends, math.ceil(position))][0]
        return below + (position % 1) * (above - below)

    mean = math.fsum(times) / sum(steps)
    return {"mean": mean, "p50": percentile(50), "p90": percentile(90), "p99": percentile(99), "max": pairs[-1][0]}
