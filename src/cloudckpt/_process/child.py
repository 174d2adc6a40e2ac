"""The upload process: `run` is its main program."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import queue
import signal
import socket
import threading
import time
from typing import NoReturn

import torch

from cloudckpt._process.channel import Channel, ClosedError, close_files
from cloudckpt._process.desk import Desk
from cloudckpt._process.messages import (
    Alive,
    Committing,
    EventError,
    EventInterrupt,
    Happened,
    Heard,
    Logged,
    Reply,
    Request,
    Sent,
    Stop,
)
from cloudckpt._trace.watchers import FIELDS
from cloudckpt.errors import portable
from cloudckpt.report import Event

PULSE_S = 0.5
"""How often it says that it lives, while it does something."""


def run(file: int) -> NoReturn:
    """Do what comes over the socket `file`, until that is closed.

    Its end is at once, in whatever is being done: nothing of a save is visible before its commit, and who would have
    been told of anything is gone.
    """
    # Who gets these decides for both: the training process, which may have a save to complete.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    _Child(Channel(socket.socket(fileno=file))).listen()


class _Child:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._desk = Desk(
            tell=self._tell,
            on_committing=self._announce_commit,
            on_sent=lambda num_bytes: self._say(Sent(num_bytes=num_bytes)),
        )
        self._requests: queue.SimpleQueue[tuple[Request, list[int]]] = queue.SimpleQueue()
        self._is_busy = threading.Event()
        self._pulsing = threading.Lock()
        self._numbers = itertools.count(1)
        self._heard: dict[int, queue.SimpleQueue[Heard]] = {}
        self._parent = os.getppid()
        logging.getLogger("cloudckpt").addHandler(_Sent(self))
        for work, name in ((self._work, "cloudckpt-upload-work"), (self._pulse, "cloudckpt-upload-pulse")):
            threading.Thread(target=work, name=name, daemon=True).start()

    def listen(self) -> NoReturn:
        """In the main thread, which does nothing else, so that an end is noticed at once."""
        while True:
            try:
                message, files = self._channel.receive(timeout_s=None)
            except ClosedError:
                os._exit(0)
            if isinstance(message, Request):
                self._requests.put((message, files))
                continue
            close_files(files)
            if isinstance(message, Heard):
                waiting = self._heard.pop(message.number, None)
                if waiting is not None:
                    waiting.put(message)
            elif isinstance(message, Stop):
                self._desk.stop(message.nonce, message.error)

    def say_logged(self, level: int, text: str, fields: dict[str, object]) -> None:
        if self._is_busy.is_set():  # else nobody listens
            self._say(Logged(level=level, text=text, fields=fields))

    def _say(self, message: object) -> None:
        with contextlib.suppress(ClosedError):  # the main thread sees it, too, and ends all
            self._channel.send(message, timeout_s=None)

    def _announce_commit(self) -> None:
        """Raises `ClosedError` where nobody can be told: then there must be no commit."""
        self._channel.send(Committing(), timeout_s=None)

    def _work(self) -> None:
        while True:
            request, files = self._requests.get()
            self._is_busy.set()
            value: object = None
            error: BaseException | None = None
            try:
                _set_environment(request.environment)
                value = self._desk.do(request.task, request.arguments, files)
            except Exception as caught:  # noqa: BLE001  # whatever it is, it is told
                error = portable(caught)
            except BaseException as caught:  # noqa: BLE001  # likewise
                error = caught if isinstance(caught, EventInterrupt) else RuntimeError(type(caught).__name__)
            with self._pulsing:  # so that nothing more is said of it after its reply
                self._is_busy.clear()
            reply = Reply(
                number=request.number, value=value, error=error, report=self._desk.report, spans=self._desk.spans()
            )
            has_failed = error is not None
            self._say(reply)
            del value, error, request, reply
            if has_failed:
                gc.collect()  # errors hold the frames that they came through, and these what they mapped

    def _pulse(self) -> None:
        while True:
            self._is_busy.wait(PULSE_S)
            if os.getppid() != self._parent:
                os._exit(0)  # also where somebody else has a copy of its end of the socket
            with self._pulsing:
                if self._is_busy.is_set():
                    self._say(Alive(spans=self._desk.spans()))
            if self._is_busy.is_set():
                time.sleep(PULSE_S)

    def _tell(self, event: Event) -> None:
        """Have `Options.on_event` called, and raise what it raised."""
        number = next(self._numbers)
        waiting: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self._heard[number] = waiting
        self._say(Happened(number=number, event=event))
        heard = waiting.get()  # the training process's end is this one's
        if heard.error is not None:
            raise (EventInterrupt if heard.is_interrupt else EventError)(number, heard.error)


class _Sent(logging.Handler):
    """Sends lines to the training process."""

    def __init__(self, child: _Child) -> None:
        super().__init__()
        self._child = child

    def emit(self, record: logging.LogRecord) -> None:
        known = {name: value for name, value in vars(record).items() if name in FIELDS}
        self._child.say_logged(record.levelno, self.format(record), known)


def _set_environment(environment: dict[str, str]) -> None:
    """As the training process has it now; but for devices, of which this one uses none."""
    wanted = {**environment, "CUDA_VISIBLE_DEVICES": ""}
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
