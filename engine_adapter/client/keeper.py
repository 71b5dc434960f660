"""The background thread that keeps a session open: connects, opens, reads, and begins again when the stream ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Protocol

import grpc

from engine_adapter.client.channel import make_channel
from engine_adapter.client.counters import ClientCounters
from engine_adapter.client.settings import ClientSettings
from engine_adapter.client.stream import SessionStream
from slidingserve.contract.codec import decode_response, encode_request
from slidingserve.contract.values import ErrorReason, OpenSession, SessionError, SessionOpened
from slidingserve.scheduler.v1 import scheduler_pb2 as pb
from slidingserve.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub

_log = logging.getLogger(__name__)

# Each question is answered once and few are open at a time; who sends more must not fill the engine's memory.
_MOST_UNREAD = 64


class _Call(Iterator[pb.ScheduleResponse], Protocol):
    """What is used of a running gRPC call."""

    def cancel(self) -> object: ...
    def code(self) -> object: ...
    def details(self) -> str | None: ...


class SessionKeeper:
    """Holds at most one open session; runs from construction until `stop`.

    Raises `ContractError` when ``message`` cannot be encoded.
    """

    def __init__(self, settings: ClientSettings, message: OpenSession, counters: ClientCounters) -> None:
        self._settings = settings
        self._counters = counters
        self._open_session = encode_request(message)
        self._channel = make_channel(settings)
        # Guards what the threads share: the fields below up to the thread.
        self._changed = threading.Condition()
        self._stream: SessionStream | None = None
        self._refusal: SessionError | None = None
        self._trouble = "no answer"
        self._sessions = 0
        self._stopping = False
        self._call: _Call | None = None
        self._thread = threading.Thread(target=self._run, name="slidingserve-client", daemon=True)
        self._thread.start()

    @property
    def stream(self) -> SessionStream | None:
        """The open session, if there is one now that has not been given up."""
        stream = self._stream
        return None if stream is None or stream.retired else stream

    @property
    def refusal(self) -> SessionError | None:
        """The sidecar's refusal, if that was the last thing heard of it."""
        return self._refusal

    @property
    def trouble(self) -> str:
        """Why the last attempt failed, in gRPC's words."""
        return self._trouble

    def wait(self, seconds: float) -> bool:
        """Waits until a session is open or refused; returns whether one is open."""
        with self._changed:
            self._changed.wait_for(lambda: self.stream or self._refusal or self._stopping, seconds)
            return self.stream is not None

    def stop(self) -> None:
        """Ends the session, the thread and the channel."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            call = self._call
        if call is not None:
            call.cancel()
        self._thread.join()

    def _run(self) -> None:
        stub = SchedulerServiceStub(self._channel)
        pause_seconds = self._settings.first_retry_seconds
        try:
            while not self._stopping:
                try:
                    answered = self._hold_session(stub)
                except Exception as error:
                    # No thread to be had, say: without this one, the engine would never be served again.
                    answered = False
                    if self._trouble != repr(error):
                        self._trouble = repr(error)
                        _log.exception("no session at %s; trying again", self._settings.target)
                if answered:
                    pause_seconds = self._settings.first_retry_seconds
                self._pause(pause_seconds)
                pause_seconds = min(2 * pause_seconds, self._settings.longest_retry_seconds)
        finally:
            self._channel.close()

    def _pause(self, seconds: float) -> None:
        if self._refusal is not None and self._refusal.reason is not ErrorReason.UNAVAILABLE:
            seconds = self._settings.refused_retry_seconds
        with self._changed:
            self._changed.wait_for(lambda: self._stopping, seconds)

    def _hold_session(self, stub: SchedulerServiceStub) -> bool:
        """Opens a session and reads until its stream ends; returns whether it answered more than OpenSession."""
        requests: SimpleQueue[pb.ScheduleRequest | None] = SimpleQueue()
        requests.put(self._open_session)
        with self._changed:
            if self._stopping:
                return False
            # Without "wait for ready": while nobody listens this fails at once, and the pause above sets the pace.
            call = self._call = stub.Schedule(iter(requests.get, None))
        answered = False
        stream: SessionStream | None = None
        try:
            opened = self._await_opened(call)
            if opened is not None:
                stream = SessionStream(opened, requests, call.cancel, self._counters)
                self._publish(stream)
                for answer in call:
                    stream.answers.put(answer)
                    answered = True
                    if stream.answers.qsize() > _MOST_UNREAD:
                        self._trouble = "more answers than questions"
                        return True
                self._trouble = "closed by the sidecar"
        except grpc.RpcError:
            self._trouble = f"{_code_name(call)}: {call.details()}"
            self._refusal = None
        finally:
            # gRPC's sending thread waits for the next request: tell it that there is none.
            requests.put(None)
            call.cancel()
            if stream is not None:
                self._withdraw(stream)
        return answered

    def _await_opened(self, call: _Call) -> SessionOpened | None:
        # A stream has no deadline of its own; cancelling it is the only way to stop waiting for its first answer.
        timer = threading.Timer(self._settings.open_timeout_seconds, call.cancel)
        timer.start()
        try:
            message = next(call, None)
        finally:
            timer.cancel()
            timer.join()
        answer = None if message is None else decode_response(message)
        if isinstance(answer, SessionOpened):
            return answer
        if isinstance(answer, SessionError):
            self._refuse(answer)
        else:
            self._trouble = f"{type(answer).__name__} in answer to OpenSession"
        return None

    def _publish(self, stream: SessionStream) -> None:
        _log.info("session %s opened at %s", stream.opened.session, self._settings.target)
        with self._changed:
            self._stream = stream
            self._refusal = None
            self._sessions += 1
            if self._sessions > 1:
                self._counters.reconnects += 1
            self._changed.notify_all()

    def _refuse(self, refusal: SessionError) -> None:
        if self._refusal is None:
            _log.warning("the sidecar at %s refuses the session: %s", self._settings.target, refusal.message)
        with self._changed:
            self._refusal = refusal
            self._changed.notify_all()

    def _withdraw(self, stream: SessionStream) -> None:
        level = logging.INFO if self._stopping or stream.retired else logging.WARNING
        _log.log(level, "session %s at %s ended: %s", stream.opened.session, self._settings.target, self._trouble)
        with self._changed:
            self._stream = None
            self._changed.notify_all()
        stream.end()


def _code_name(call: _Call) -> str:
    code = call.code()
    return code.name if isinstance(code, grpc.StatusCode) else str(code)
