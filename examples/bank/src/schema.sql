-- The log. Positions are drawn from the sequence of the identity column; a rollback burns those it drew.
CREATE TABLE bank_events (
    position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id uuid NOT NULL DEFAULT gen_random_uuid(),
    stream_id text NOT NULL,
    type text NOT NULL,
    data json NOT NULL,
    metadata json NOT NULL DEFAULT '{}',
    occurred_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The read models.
CREATE TABLE bank_balances (
    account bigint PRIMARY KEY,
    owner text NOT NULL,
    cents bigint NOT NULL,
    closed boolean NOT NULL
);

CREATE TABLE bank_statements (
    number bigint PRIMARY KEY,
    account bigint NOT NULL,
    position bigint NOT NULL,
    cents bigint NOT NULL,
    -- Since the statement before.
    change bigint NOT NULL
);

CREATE INDEX ON bank_statements (account, position);

CREATE TABLE bank_entries (
    position bigint,
    leg smallint,
    account bigint NOT NULL,
    cents bigint NOT NULL,
    PRIMARY KEY (position, leg)
);
