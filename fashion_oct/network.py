"""Finds out whether a download can work, before a library tries for minutes."""

import queue
import threading
import urllib.request


def check_host_answers(url: str, seconds: float = 3.0) -> None:
    """Asks the host of `url`, through the proxy of the environment if there is one.

    In a thread, since looking up a name has no time-out of its own.

    Args:
      url: an address of the host.
      seconds: how long to wait.

    Raises:
      OSError: no answer in that time.
    """
    answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def ask():
        try:
            request = urllib.request.Request(url, method="HEAD")
            opener = urllib.request.build_opener()  # urlopen's own keeps the proxy of its first call
            with opener.open(request, timeout=seconds):
                answers.put(None)
        except Exception as error:  # it is raised below, in the thread that waits
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"its host did not answer within {seconds:g} s") from None
    if error is not None:
        raise OSError(f"its host did not answer ({error})")
