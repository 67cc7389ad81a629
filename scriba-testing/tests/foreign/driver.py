"""Does what a test says, with the published client `kurrentdbclient`.

A line of input is a JSON object: what to `do`, and with what. It is answered by a line with what came of it, as `ok`,
or with the `error` that the client raised.
"""

import dataclasses
import json
import os
import queue
import sys
import threading
import uuid

from kurrentdbclient import KurrentDBClient, NewEvent, StreamState


class Reader:
    """Takes what a subscription delivers, so that a test can wait for it, or see that nothing comes."""

    def __init__(self, subscription):
        self.subscription = subscription
        self.arrived = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        try:
            for event in self.subscription:
                self.arrived.put(event)
            self.arrived.put(EOFError("the subscription has ended"))
        except Exception as error:
            self.arrived.put(error)

    def next(self, timeout):
        arrived = self.arrived.get(timeout=timeout)
        if isinstance(arrived, Exception):
            raise arrived
        return arrived


class Driver:
    def __init__(self, uri):
        self.client = KurrentDBClient(uri)
        self.readers = {}

    def call(self, method, **arguments):
        """Any method of the client that takes and gives back plain values."""
        return getattr(self.client, method)(**arguments)

    def append(self, stream_name, events):
        events = [NewEvent(type=type, data=data.encode(), id=uuid.UUID(id)) for type, data, id in events]
        return self.client.append_to_stream(stream_name, current_version=StreamState.ANY, events=events)

    def subscribe(self, name, method, **arguments):
        self.readers[name] = Reader(getattr(self.client, method)(**arguments))

    def next(self, name, count, timeout):
        return [self.readers[name].next(timeout) for _ in range(count)]

    def waiting(self, name, timeout):
        """Whether something arrives within the time."""
        try:
            return self.readers[name].next(timeout)
        except queue.Empty:
            return None

    def ack(self, name, ids):
        for id in ids:
            self.readers[name].subscription.ack(uuid.UUID(id))

    def nack(self, name, ids, action):
        for id in ids:
            self.readers[name].subscription.nack(uuid.UUID(id), action)

    def close(self, name):
        self.readers.pop(name).subscription.stop()


def plain(value):
    if dataclasses.is_dataclass(value):
        return dataclasses.asdict(value)
    return value.decode() if isinstance(value, bytes) else str(value)


def main():
    driver = Driver(sys.argv[1])
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"ok": getattr(driver, command.pop("do"))(**command)}
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer, default=plain), flush=True)
    # Threads that wait for events would be waited for.
    os._exit(0)


main()
