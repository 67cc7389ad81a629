-- The control tables of Scriba, version 1. Can be applied again.

-- The hot row of each version of a projection: one UPDATE per committed batch and nothing else.
-- Half of each page stays free and vacuum comes early, so that those updates stay inside their page.
CREATE TABLE IF NOT EXISTS scriba_checkpoints (
    name text NOT NULL,
    version bigint NOT NULL,
    -- Raised by every take-over; a commit under another epoch moves no row.
    epoch bigint NOT NULL DEFAULT 0,
    -- Commits so far; a commit names the number it expects.
    commit_no bigint NOT NULL DEFAULT 0,
    -- Everything up to it is accounted for; NULL is the beginning.
    watermark bigint,
    -- The last event seen: what proves that the source is still the same.
    last_position bigint,
    last_event_id text,
    applied bigint NOT NULL DEFAULT 0,
    skipped bigint NOT NULL DEFAULT 0,
    dead_lettered bigint NOT NULL DEFAULT 0,
    -- Dead letters since the last applied event, and hashes of the streams they are of, as many as the circuit counts.
    dead_letters_in_row bigint NOT NULL DEFAULT 0,
    dead_letter_streams bigint[] NOT NULL DEFAULT '{}',
    -- NULL is all types.
    event_types text[],
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (name, version),
    -- A watermark that was lowered by hand would apply events twice.
    CHECK (last_position IS NULL OR (watermark >= last_position) IS TRUE)
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 500,
    autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0
);

-- Who may run a projection, and until when by the clock of this server. Apart from the checkpoint, so that a renewal
-- never waits for a batch.
CREATE TABLE IF NOT EXISTS scriba_leases (
    name text NOT NULL,
    version bigint NOT NULL,
    owner text NOT NULL,
    holder text NOT NULL,
    expires_at timestamptz NOT NULL,
    PRIMARY KEY (name, version)
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 500
);

-- Nodes that have asked for a lease in vain and will ask again: each note counts for a while. They keep a projection from
-- being reset under them.
CREATE TABLE IF NOT EXISTS scriba_standbys (
    name text NOT NULL,
    version bigint NOT NULL,
    owner text NOT NULL,
    holder text NOT NULL,
    expires_at timestamptz NOT NULL,
    PRIMARY KEY (name, version, owner)
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 500
);

-- The cold row of each version: what its owner writes down for others to read. A reset takes it away, and the next owner
-- makes a new one.
CREATE TABLE IF NOT EXISTS scriba_projections (
    name text NOT NULL,
    version bigint NOT NULL,
    source_kind text NOT NULL,
    source_fingerprint text NOT NULL,
    state text NOT NULL DEFAULT 'initializing',
    halt_reason text,
    halt_class text,
    halt_code text,
    degraded_since timestamptz,
    last_error text,
    -- The source's head when last asked.
    head bigint,
    -- The source's server keeps a position of its own, which a reset has to reset too.
    source_keeps_position boolean NOT NULL DEFAULT false,
    -- Where this version first caught up with its source; -1 where that was empty.
    replay_position bigint,
    -- What an operator asks of whoever runs it.
    wish text,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (name, version)
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 500
);

-- Events that could not be handled. The bytes are complete; the JSON columns are there to be read and are NULL where
-- the bytes are not JSON that Postgres can store.
CREATE TABLE IF NOT EXISTS scriba_dead_letters (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL,
    version bigint NOT NULL,
    position bigint NOT NULL,
    stream_id text NOT NULL,
    event_type text NOT NULL,
    event_id text NOT NULL,
    data bytea NOT NULL,
    metadata bytea NOT NULL,
    data_json jsonb,
    metadata_json jsonb,
    error_kind text NOT NULL,
    error_message text NOT NULL,
    error_detail text NOT NULL,
    attempts bigint NOT NULL,
    occurred_at timestamptz,
    failed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (name, version, position)
);

-- An index entry has room for some 2,700 bytes and a stream id may be longer, so only its beginning is indexed.
CREATE INDEX IF NOT EXISTS scriba_dead_letters_stream_idx ON scriba_dead_letters (name, version, left(stream_id, 200));

-- The checkpoint statement: moves the row from exactly the expected state, or fails with SB001 and with it the
-- transaction, so that nothing sent after it can be written.
CREATE OR REPLACE FUNCTION scriba_advance(
    p_name text,
    p_version bigint,
    p_epoch bigint,
    p_commit_no bigint,
    p_watermark bigint,
    p_last_position bigint,
    p_last_event_id text,
    p_applied bigint,
    p_skipped bigint,
    p_dead_lettered bigint,
    p_in_row bigint,
    p_streams bigint[]
) RETURNS void LANGUAGE plpgsql AS $body$
BEGIN
    UPDATE scriba_checkpoints AS c
    SET commit_no = c.commit_no + 1,
        watermark = p_watermark,
        last_position = coalesce(p_last_position, c.last_position),
        last_event_id = coalesce(p_last_event_id, c.last_event_id),
        applied = c.applied + p_applied,
        skipped = c.skipped + p_skipped,
        dead_lettered = c.dead_lettered + p_dead_lettered,
        dead_letters_in_row = p_in_row,
        dead_letter_streams = p_streams,
        updated_at = clock_timestamp()
    WHERE c.name = p_name AND c.version = p_version AND c.epoch = p_epoch AND c.commit_no = p_commit_no;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING
            ERRCODE = 'SB001',
            MESSAGE = format('the checkpoint of %s v%s is not at epoch %s and commit number %s',
                             p_name, p_version, p_epoch, p_commit_no);
    END IF;
END
$body$;

-- Code of the user's runs in some transactions, and a COMMIT in it would make the checkpoint durable without the rest of
-- the batch. Such a transaction commits only after the engine has named the state it moved the checkpoint to, which it
-- does last.
CREATE OR REPLACE FUNCTION scriba_check_commit() RETURNS trigger LANGUAGE plpgsql AS $body$
BEGIN
    IF current_setting('scriba.commit', true) IS DISTINCT FROM format('%s.%s', NEW.epoch, NEW.commit_no) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'SB002',
            MESSAGE = format('only the engine commits batches of %s v%s', NEW.name, NEW.version),
            HINT = 'Take COMMIT and what implies it out of the closure of `custom`.';
    END IF;
    RETURN NULL;
END
$body$;

-- `scriba.guard` is set, for the transaction, before the checkpoint moves; other transactions pay nothing.
DROP TRIGGER IF EXISTS scriba_commit_guard ON scriba_checkpoints;
CREATE CONSTRAINT TRIGGER scriba_commit_guard AFTER UPDATE ON scriba_checkpoints
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (current_setting('scriba.guard', true) = 'on')
    EXECUTE FUNCTION scriba_check_commit();
ALTER TABLE scriba_checkpoints ENABLE ALWAYS TRIGGER scriba_commit_guard;

-- The JSON in some bytes, or NULL where they are not UTF-8, not JSON, or JSON that jsonb cannot hold.
CREATE OR REPLACE FUNCTION scriba_readable_json(p_bytes bytea) RETURNS jsonb LANGUAGE plpgsql IMMUTABLE AS $body$
BEGIN
    RETURN convert_from(p_bytes, 'UTF8')::jsonb;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END
$body$;

-- Comes last: a migration that stopped half-way leaves the version before.
CREATE OR REPLACE FUNCTION scriba_schema_version() RETURNS integer LANGUAGE sql IMMUTABLE AS $body$ SELECT 1 $body$;
