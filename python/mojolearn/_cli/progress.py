# SPDX-License-Identifier: Apache-2.0
"""How a long run shows itself: a bar on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import shutil
import sys
import time

REDRAW_SECONDS = 0.1
PLAIN_SECONDS = 10.0
LOSS_WINDOW = 500  # steps over which the shown loss is averaged, roughly


def duration(seconds: float) -> str:
    """Minutes and seconds, with hours if there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Progress:
    """Shows steps, loss, speed and the time that is left, from `start` to `total` steps."""

    def __init__(self, start: int, total: int, tokens_per_step: int) -> None:
        self._terminal = sys.stdout.isatty()
        unicode = (sys.stdout.encoding or "").lower().startswith("utf")
        self._full, self._empty = ("━", "─") if unicode else ("#", ".")
        self._start = self._step = start
        self._total = total
        self._tokens_per_step = tokens_per_step
        self._loss = 0.0
        self._began = self._shown = time.monotonic()
        self._seconds: float | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds = self.seconds
        self.clear()

    @property
    def seconds(self) -> float:
        """Since the beginning, until the end."""
        return time.monotonic() - self._began if self._seconds is None else self._seconds

    @property
    def tokens(self) -> int:
        return (self._step - self._start) * self._tokens_per_step

    def advance(self, loss: float) -> None:
        """Counts a step with its loss, and shows it if it is time."""
        self._step += 1
        self._loss += (loss - self._loss) / min(LOSS_WINDOW, self._step - self._start)
        now = time.monotonic()
        if now - self._shown >= (REDRAW_SECONDS if self._terminal else PLAIN_SECONDS):
            if self._terminal:
                self._draw()
            else:
                self.milestone()
            self._shown = now

    def milestone(self, remark: str = "") -> None:
        """A lasting line on where the run is; the bar goes on below it."""
        self.clear()
        step = f"{self._step:{len(f'{self._total:,}')},}"
        print(f"  step {step}  {self._numbers()}  {remark}".rstrip(), flush=True)
        self._shown = time.monotonic()

    def clear(self) -> None:
        """Takes the bar away."""
        if self._terminal:
            sys.stdout.write("\r\x1b[K")
            sys.stdout.flush()

    def _numbers(self) -> str:
        done = max(1, self._step - self._start)
        speed = self.tokens / max(self.seconds, 1e-9)
        left = self.seconds / done * (self._total - self._step)
        return f"loss {self._loss:.3f}  {speed:,.0f} tokens/s  {duration(left)} left"

    def _draw(self) -> None:
        share = self._step / self._total
        text = f"  {share:.0%}  {self._numbers()}"
        width = min(30, shutil.get_terminal_size().columns - len(text) - 3)
        done = round(width * share)
        sys.stdout.write("\r\x1b[K  " + self._full * done + self._empty * (width - done) + text)
        sys.stdout.flush()
