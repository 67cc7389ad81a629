"""Runs examples of the documentation that `kurrentdbclient` brings along, as they are, against a server."""

import faulthandler
import importlib.metadata
import os
import re
import sys
import traceback
import uuid

from kurrentdbclient import KurrentDBClient, NewEvent, StreamState

# One that waits for ever says where.
faulthandler.dump_traceback_later(60, exit=True)

address = sys.argv[1]
documentation = importlib.metadata.metadata("kurrentdbclient").get_payload()


def run(chapter, names):
    """Runs the examples of a chapter one after another, and counts them."""
    text = re.search(rf"^## {chapter}<a.*?(?=^## )", documentation, re.DOTALL | re.MULTILINE).group()
    examples = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for example in examples:
        exec(example.replace("localhost:2113", address), names)
    return len(examples)


def main():
    print("Synopsis", run("Synopsis", {}))

    # The chapter builds on what earlier ones have appended.
    client = KurrentDBClient(f"kurrentdb://{address}?Tls=false")
    names = {"client": client, "uuid": uuid}
    for stream in (1, 2, 3):
        events = [NewEvent(type="OrderCreated", data=b"{}") for _ in range(3)]
        names.update({f"event{3 * stream - 2 + at}": event for at, event in enumerate(events)})
        name = names[f"stream_name{stream}"] = str(uuid.uuid4())
        position = client.append_to_stream(name, current_version=StreamState.NO_STREAM, events=events)
        names[f"commit_position{stream}"] = position
    print("Persistent subscriptions", run("Persistent subscriptions", names))


try:
    main()
    status = 0
except Exception:
    traceback.print_exc()
    status = 1
sys.stdout.flush()
# A subscription that an example leaves open would be waited for.
os._exit(status)
