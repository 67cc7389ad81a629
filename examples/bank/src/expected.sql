-- What the read models have to be, worked out from the log alone: the writer marks in the metadata what each event is
-- to come to, if not to be applied. Materialized, because bodies that are bad on purpose cannot be cast.
CREATE VIEW bank_expected_entries AS
WITH good AS MATERIALIZED (
    SELECT position, type, data FROM bank_events
    WHERE type IN ('Deposited', 'Withdrawn', 'Transferred') AND metadata->>'dead_letter' IS NULL
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

CREATE VIEW bank_expected_dead_letters AS
SELECT position, type, metadata->>'dead_letter' AS kind FROM bank_events WHERE metadata->>'dead_letter' IS NOT NULL;
