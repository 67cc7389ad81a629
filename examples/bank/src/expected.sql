-- What the read models have to be, worked out from the log alone: the writer marks in the metadata what each event is
-- to come to in a projection, if not to be applied: `skipped`, or the kind of its dead letter. Materialized, because bodies
-- that are bad on purpose cannot be cast.
CREATE VIEW bank_expected_entries AS
WITH good AS MATERIALIZED (
    SELECT position, type, data FROM bank_events
    WHERE type IN ('Deposited', 'Withdrawn', 'Transferred') AND metadata->>'entries' IS NULL
)
SELECT position, leg::smallint, account::bigint, (sign * (data->>'cents')::bigint)::bigint AS cents
FROM good CROSS JOIN LATERAL (
    SELECT 1, data->>'account', 1 WHERE type = 'Deposited'
    UNION ALL SELECT 1, data->>'account', -1 WHERE type = 'Withdrawn'
    UNION ALL SELECT 1, data->>'from', -1 WHERE type = 'Transferred'
    UNION ALL SELECT 2, data->>'to', 1 WHERE type = 'Transferred'
) AS legs (leg, account, sign);

CREATE VIEW bank_expected_balances AS
SELECT (data->>'account')::bigint AS account,
       data->>'owner' AS owner,
       coalesce(sums.cents, 0)::bigint AS cents,
       EXISTS (
           SELECT FROM bank_events AS closed
           WHERE closed.type = 'AccountClosed' AND closed.stream_id = opened.stream_id
       ) AS closed
FROM bank_events AS opened
LEFT JOIN (SELECT account, sum(cents) AS cents FROM bank_expected_entries GROUP BY account) AS sums
    ON sums.account = (data->>'account')::bigint
WHERE type = 'AccountOpened';

-- The balance of an account at the position of each of its statements.
CREATE VIEW bank_expected_statements AS
WITH lines AS (
    SELECT NULL::bigint AS number, account, position, leg, cents FROM bank_expected_entries
    UNION ALL
    SELECT (data->>'number')::bigint, (data->>'account')::bigint, position, 1, 0 FROM bank_events
    WHERE type = 'StatementIssued' AND metadata->>'balances' IS NULL
), running AS (
    SELECT number, account, position, sum(cents) OVER (PARTITION BY account ORDER BY position, leg)::bigint AS cents
    FROM lines
)
SELECT number, account, position, cents,
       cents - lag(cents, 1, 0::bigint) OVER (PARTITION BY account ORDER BY position) AS change
FROM running WHERE number IS NOT NULL;

CREATE VIEW bank_expected_dead_letters AS
SELECT name, position, type, metadata->>name AS kind
FROM bank_events CROSS JOIN (VALUES ('balances'), ('entries')) AS projections (name)
WHERE metadata->>name <> 'skipped';
