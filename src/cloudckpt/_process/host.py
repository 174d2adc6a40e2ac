"""The training process's end: starts the upload process, asks it, and finds out what became of it."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import pickle
import subprocess
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from cloudckpt import _forks
from cloudckpt._process.channel import MOST_FILES, Channel, ClosedError, GarbledError, SilentError
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
    Spans,
    Stop,
    Task,
)
from cloudckpt._process.starting import how_it_ended, started
from cloudckpt.errors import CloudckptError, InvalidOptionError
from cloudckpt.report import Event

_LEAST_START_S = 60.0
"""It may take so long to import everything, on a machine that may be busy, before it can say that it lives."""
_LEAST_SILENCE_S = 5.0
"""A process that merely gets no CPU time is not taken for dead sooner."""
_END_S = 10.0
"""How long a process that was killed, or whose socket was closed, is waited for."""

_log = logging.getLogger("cloudckpt")


class LostProcessError(Exception):
    """The upload process ended, or was ended because it gave no sign of life. The message says how."""

    def __init__(self, message: str, *, may_have_committed: bool) -> None:
        super().__init__(message)
        self.may_have_committed = may_have_committed


class Listener(Protocol):
    """Who hears of what happens while a task is carried out, in the thread that asked for it."""

    def on_event(self, event: Event) -> None:
        """What it raises is raised where the event happened, which waits for it."""

    def on_spans(self, spans: Spans) -> None:
        """For the timeline."""

    def on_sent(self, num_bytes: int) -> None:
        """The store has so many more."""


class UploadProcess:
    """A process that carries out the tasks of saves, started when it is first asked, and anew after it was lost.

    It ends with `close`, and within a second of this process's end, however that comes. One request at a time: others
    wait. A process that is forked from this one has nothing to do with it.
    """

    def __init__(self) -> None:
        self._turn = threading.RLock()
        self._channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.has_answered = False
        """Whether the process has ever said anything; else it may still be starting."""
        self._num_requests = 0
        _forks.watch(self)

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Have it started, if it is not, without waiting until it can be asked. Raises `LostProcessError`."""
        with self._turn:
            if self._channel is not None and self._channel.is_open():
                return
            self._end()
            try:
                self._channel, self._process = started()
            except InvalidOptionError:
                raise
            except (OSError, ValueError) as error:
                raise LostProcessError(f"could not be started ({error})", may_have_committed=False) from error
            self.has_answered = False

    def ask(
        self,
        task: Task,
        arguments: Sequence[Any],
        *,
        files: Sequence[int] = (),
        timeout_s: float,
        listener: Listener,
    ) -> Reply:
        """Have `task` carried out; `listener` hears of it meanwhile. An error of the task is in the reply.

        Raises `LostProcessError` where the process ends, or gives no sign of life for `timeout_s`, or for a minute if
        that is longer and it has only been started: then it is ended.
        Raises whatever pickling the arguments raises, before anything is asked.
        """
        if len(files) > MOST_FILES:
            raise CloudckptError(f"a snapshot in {len(files)} segments cannot be handed over: {MOST_FILES} can")
        pickled = pickle.dumps(tuple(arguments), pickle.HIGHEST_PROTOCOL)
        with self._turn:
            if self._channel is None or self._process is None:
                raise LostProcessError("it is not running", may_have_committed=False)
            self._num_requests += 1
            request = Request(number=self._num_requests, task=task, arguments=pickled, environment=dict(os.environ))
            asked = _Asked(self._channel, request.number, listener)
            silence_s = max(timeout_s, _LEAST_SILENCE_S)
            patience_s = silence_s if self.has_answered else max(timeout_s, _LEAST_START_S)
            try:
                self._channel.send(request, files, timeout_s=patience_s)
                while asked.reply is None:
                    message, _ = self._channel.receive(timeout_s=patience_s)
                    self.has_answered, patience_s = True, silence_s
                    asked.take(message, timeout_s=silence_s)
            except ClosedError:
                why = self._end()
            except GarbledError as error:
                self._end()
                why = f"said what is not understood here ({error}) and was ended"
                asked.is_committing = True  # it could have been this
            except SilentError:
                self._process.kill()  # first of all: it may go on at any moment
                while asked.hear_last_word(timeout_s=_END_S):
                    pass
                self._end()
                why = f"gave no sign of life for {patience_s:g} s and was ended"
                if not self.has_answered:
                    why += " (it had only been started: where that takes longer, raise Options(timeout_s=…))"
            else:
                return asked.reply
            raise LostProcessError(why, may_have_committed=asked.is_committing)

    def stop(self, nonce: str, error: BaseException) -> None:
        """Have the save with this ticket fail with `error` as soon as it can. For any thread; does not wait for it."""
        channel = self._channel
        if channel is not None:
            with contextlib.suppress(ClosedError, SilentError):
                channel.send(Stop(nonce=nonce, error=error), timeout_s=_LEAST_SILENCE_S)

    def close(self) -> None:
        """End it, and whatever it does. It is started again when it is needed again."""
        channel = self._channel
        if channel is not None:
            channel.shut()  # who waits for it learns of it
        with self._turn:
            self._end()

    def after_fork(self) -> None:
        """The upload process is the parent's."""
        if self._channel is not None:
            self._channel.forget()
        if self._process is not None:
            self._process.returncode = 0  # nothing to wait for, and nothing to warn of
        self._turn = threading.RLock()
        self._channel = self._process = None

    def _end(self) -> str:
        """What became of the process, once it has ended: after an end of its own it is only collected."""
        channel, process = self._channel, self._process
        self._channel = self._process = None
        if channel is None or process is None:
            return "was closed"
        was_open = channel.is_open()
        channel.close()
        try:
            process.wait(_END_S if not was_open else 1.0)  # it ends by itself as soon as its socket is closed
        except subprocess.TimeoutExpired:
            process.kill()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:  # in a call to the kernel that does not end
                return "could not even be killed"
        return how_it_ended(process.returncode)


class _Asked:
    """A request on its way."""

    def __init__(self, channel: Channel, number: int, listener: Listener) -> None:
        self.reply: Reply | None = None
        self.is_committing = False
        self._channel = channel
        self._number = number
        self._listener = listener
        self._raised: dict[int, BaseException] = {}

    def take(self, message: object, *, timeout_s: float) -> None:
        if isinstance(message, (Alive, Reply)) and message.spans:
            self._listener.on_spans(message.spans)
        if isinstance(message, Committing):
            self.is_committing = True
        elif isinstance(message, Logged):
            _log.log(message.level, "%s", message.text, extra=message.fields)
        elif isinstance(message, Sent):
            self._listener.on_sent(message.num_bytes)
        elif isinstance(message, Happened):
            self._channel.send(self._heard(message), timeout_s=timeout_s)
        elif isinstance(message, Reply) and message.number == self._number:
            error = message.error
            if isinstance(error, (EventError, EventInterrupt)):
                error = self._raised.get(error.number, error)
            self.reply = dataclasses.replace(message, error=error)

    def hear_last_word(self, *, timeout_s: float) -> bool:
        """Whether there was one more, of a process that says no more: it can only be known so if a commit began."""
        try:
            message, _ = self._channel.receive(timeout_s=timeout_s)
        except SilentError:
            self.is_committing = True  # it could not even be killed
            return False
        except ClosedError:
            return False
        self.is_committing |= isinstance(message, Committing)
        return True

    def _heard(self, message: Happened) -> Heard:
        try:
            self._listener.on_event(message.event)
        except BaseException as error:  # noqa: BLE001  # it is raised where the event happened, and comes back from there
            self._raised[message.number] = error
            text = f"{type(error).__name__}: {error}"
            return Heard(number=message.number, error=text, is_interrupt=not isinstance(error, Exception))
        return Heard(number=message.number, error=None, is_interrupt=False)


_own = UploadProcess()


def upload_process() -> UploadProcess:
    """The one of this process, for all of its saves. It runs from its `start` to its `close`, or this process's end."""
    return _own


# By then all saves have ended: their threads are waited for first.
atexit.register(_own.close)
