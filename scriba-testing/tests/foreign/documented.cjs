// What the documentation of `@kurrent/kurrentdb-client` shows, against the server of the connection string. Each line of
// output is a JSON array: a step, and what came of it.

const {
  KurrentDBClient,
  jsonEvent,
  FORWARDS,
  NO_STREAM,
  START,
  persistentSubscriptionToStreamSettingsFromDefaults,
} = require("@kurrent/kurrentdb-client");

const say = (step, value) =>
  console.log(JSON.stringify([step, value], (_, v) => (typeof v === "bigint" ? Number(v) : v)));

/** Takes so many events of a subscription, and does something with each. */
async function take(subscription, count, each) {
  const taken = [];
  for await (const resolved of subscription) {
    taken.push([resolved.event.type, resolved.event.revision, resolved.event.data]);
    await each(resolved);
    if (taken.length === count) break;
  }
  return taken;
}

async function main() {
  const client = KurrentDBClient.connectionString(process.argv[2]);
  const reservation = (seat) => jsonEvent({ type: "seat-reserved", data: { seat } });

  const appended = await client.appendToStream("booking-1", [reservation("4b"), reservation("5c")], {
    streamState: NO_STREAM,
  });
  say("append", [appended.success, appended.nextExpectedRevision]);

  const conflict = client.appendToStream("booking-1", [reservation("6d")], { streamState: NO_STREAM });
  say("append again", await conflict.catch((error) => error.type));

  const read = [];
  const options = { direction: FORWARDS, fromRevision: START, maxCount: 10 };
  for await (const { event } of client.readStream("booking-1", options)) read.push([event.revision, event.data]);
  say("read", read);

  const catchUp = client.subscribeToStream("booking-1", { fromRevision: START });
  const nothing = async () => {};
  const caught = take(catchUp, 3, nothing);
  await client.appendToStream("booking-1", [reservation("7e")]);
  say("subscribe", await caught);

  const settings = persistentSubscriptionToStreamSettingsFromDefaults({ startFrom: START });
  await client.createPersistentSubscriptionToStream("booking-1", "seats", settings);
  const group = client.subscribeToPersistentSubscriptionToStream("booking-1", "seats", { bufferSize: 2 });
  say("persistent", await take(group, 3, (resolved) => group.ack(resolved)));
  // The last ack is on its way.
  process.stdin.once("data", async () => {
    await group.unsubscribe();
    await client.dispose();
    process.exit(0);
  });
}

// One that waits for ever ends.
setTimeout(() => process.exit(2), 60_000).unref();

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
