//! The texts that read the catalogue.

/// One row for the table of that name, none where there is none.
///
/// `cascaded` holds the tables whose rows a delete or update here may change through foreign keys; `component`
/// those that foreign keys connect in either direction; `draws` which sequences number rows of which tables. Functions in C
/// count as built in: they do not read tables, unless they are volatile. What a check calls is read off its stored tree,
/// since dependencies name the operator in place of its function, and no domain that it casts to.
pub(super) const TABLE: &str = r"
WITH RECURSIVE
me AS (
    SELECT c.* , c.oid AS id FROM pg_catalog.pg_class c WHERE c.oid = pg_catalog.to_regclass($1)
),
component (id) AS (
    SELECT id FROM me
    UNION
    SELECT CASE WHEN f.conrelid = k.id THEN f.confrelid ELSE f.conrelid END
    FROM component k JOIN pg_catalog.pg_constraint f ON f.contype = 'f' AND k.id IN (f.conrelid, f.confrelid)
),
cascaded (id) AS (
    SELECT id FROM me
    UNION
    SELECT f.conrelid FROM cascaded k
    JOIN pg_catalog.pg_constraint f ON f.contype = 'f' AND f.confrelid = k.id
    WHERE f.confdeltype IN ('c', 'n', 'd') OR f.confupdtype IN ('c', 'n', 'd')
),
reacting (id) AS (
    SELECT tgrelid FROM pg_catalog.pg_trigger WHERE NOT tgisinternal AND tgenabled <> 'D'
    UNION
    SELECT ev_class FROM pg_catalog.pg_rewrite WHERE ev_enabled <> 'D' AND ev_type <> '1'
),
draws (sequence, id) AS (
    SELECT d.refobjid, f.adrelid
    FROM pg_catalog.pg_attrdef f
        JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_attrdef'::regclass AND d.objid = f.oid
            AND d.refclassid = 'pg_catalog.pg_class'::regclass
        JOIN pg_catalog.pg_class s ON s.oid = d.refobjid AND s.relkind = 'S'
    UNION
    SELECT s.oid, d.refobjid
    FROM pg_catalog.pg_class s
        JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_class'::regclass AND d.objid = s.oid
            AND d.refclassid = 'pg_catalog.pg_class'::regclass AND d.deptype = 'i'
    WHERE s.relkind = 'S'
)
SELECT me.id::int8 AS oid,
    (SELECT min(id::int8) FROM component) AS component,
    me.relkind = 'r' AS plain,
    me.relispartition OR EXISTS (SELECT FROM pg_catalog.pg_inherits i WHERE me.id IN (i.inhrelid, i.inhparent)) AS related,
    EXISTS (SELECT FROM reacting r WHERE r.id = me.id) AS reacts,
    pg_catalog.row_security_active(me.id) AS row_security,
    EXISTS (SELECT FROM pg_catalog.pg_constraint f
        WHERE f.contype = 'f' AND f.conrelid = me.id AND f.confrelid = me.id) AS references_itself,
    EXISTS (SELECT FROM pg_catalog.pg_constraint d
        WHERE d.condeferrable AND (
            d.conrelid IN (SELECT id FROM cascaded) OR d.confrelid IN (SELECT id FROM cascaded)
            OR d.conrelid IN (SELECT relid FROM pg_catalog.pg_partition_tree(me.id))
            OR d.confrelid IN (SELECT relid FROM pg_catalog.pg_partition_tree(me.id)))) AS deferrable,
    EXISTS (SELECT FROM pg_catalog.pg_constraint c
        WHERE c.contype = 'c' AND c.conrelid = me.id AND (c.conbin::text ~ '{COERCETODOMAIN ' OR EXISTS (
            SELECT FROM pg_catalog.regexp_matches(c.conbin::text, ':(?:funcid|opfuncid) (\d+)', 'g') AS called (id)
                JOIN pg_catalog.pg_proc p ON p.oid = called.id[1]::oid
                JOIN pg_catalog.pg_language l ON l.oid = p.prolang
            WHERE p.provolatile = 'v' OR p.provolatile = 's' AND l.lanname NOT IN ('internal', 'c')))
    ) AS checks_by_code,
    EXISTS (SELECT FROM draws mine JOIN draws other ON other.sequence = mine.sequence AND other.id <> mine.id
        WHERE mine.id = me.id) AS shares_sequence,
    EXISTS (SELECT FROM cascaded k JOIN reacting r ON r.id = k.id WHERE k.id <> me.id) AS cascade_reacts,
    EXISTS (SELECT FROM pg_catalog.pg_constraint f
        WHERE f.contype = 'f' AND f.confrelid = me.id AND f.confdeltype IN ('c', 'n', 'd')) AS cascades
FROM me";

/// One row for each column. `own_code` and `volatile` speak of the default that an insert without the column takes;
/// the functions of a default are read off its stored tree, since dependencies leave out the built-in ones: volatile ones of
/// Postgres count as code of one's own unless they are known to read nothing, and `nextval` where the default names its
/// sequence at run time only. The columns that checks, indexes and generated columns look at too, 0 for the whole row, since dependencies leave that one out. What a
/// foreign key refers to stands in an index.
pub(super) const COLUMNS: &str = r"
WITH RECURSIVE
base (attnum, typ, domain, constrained, defaulted) AS (
    SELECT a.attnum, a.atttypid, false, false, false
    FROM pg_catalog.pg_attribute a WHERE a.attrelid = $1::int8::oid AND a.attnum > 0 AND NOT a.attisdropped
    UNION ALL
    SELECT b.attnum, t.typbasetype, true,
        b.constrained OR t.typnotnull
            OR EXISTS (SELECT FROM pg_catalog.pg_constraint c WHERE c.contypid = t.oid),
        b.defaulted OR t.typdefault IS NOT NULL
    FROM base b JOIN pg_catalog.pg_type t ON t.oid = b.typ AND t.typtype = 'd'
),
called AS (
    SELECT d.adnum,
        bool_or(CASE
            WHEN p.provolatile = 'i' THEN false
            WHEN l.lanname NOT IN ('internal', 'c') THEN true
            WHEN p.provolatile = 's' OR p.pronamespace <> 'pg_catalog'::regnamespace THEN false
            WHEN p.proname = 'nextval' THEN NOT EXISTS (SELECT FROM pg_catalog.pg_depend s
                JOIN pg_catalog.pg_class q ON q.oid = s.refobjid AND q.relkind = 'S'
                WHERE s.classid = 'pg_catalog.pg_attrdef'::regclass AND s.objid = d.oid
                    AND s.refclassid = 'pg_catalog.pg_class'::regclass)
            ELSE p.proname NOT IN ('random', 'random_normal', 'gen_random_uuid', 'uuidv4', 'uuidv7', 'clock_timestamp', 'timeofday')
        END) AS own_code,
        bool_or(p.provolatile = 'v') AS volatile
    FROM pg_catalog.pg_attrdef d,
        LATERAL pg_catalog.regexp_matches(d.adbin::text, ':(?:funcid|opfuncid) (\d+)', 'g') AS called (id)
        JOIN pg_catalog.pg_proc p ON p.oid = called.id[1]::oid
        JOIN pg_catalog.pg_language l ON l.oid = p.prolang
    WHERE d.adrelid = $1::int8::oid GROUP BY d.adnum
),
trees (tree) AS (
    SELECT c.conbin::text FROM pg_catalog.pg_constraint c WHERE c.conrelid = $1::int8::oid
    UNION ALL
    SELECT concat(i.indexprs::text, i.indpred::text) FROM pg_catalog.pg_index i WHERE i.indrelid = $1::int8::oid
    UNION ALL
    SELECT d.adbin::text FROM pg_catalog.pg_attrdef d WHERE d.adrelid = $1::int8::oid
)
SELECT a.attnum, a.attname::text AS name, declared.typname::text AS type_name,
    NOT b.constrained AND (t.typtype = 'e' OR t.typnamespace = 'pg_catalog'::regnamespace AND t.typname IN (
        'bool', 'int2', 'int4', 'int8', 'float4', 'float8', 'numeric', 'text', 'varchar', 'bpchar', 'bytea', 'uuid',
        'date', 'time', 'timestamp', 'timestamptz', 'interval', 'json', 'jsonb')) AS fusible_type,
    coalesce((SELECT l.collisdeterministic FROM pg_catalog.pg_collation l WHERE l.oid = a.attcollation), true)
        AND declared.typnamespace = 'pg_catalog'::regnamespace AS deterministic,
    declared.typnamespace = 'pg_catalog'::regnamespace AS built_in,
    a.atttypmod <> -1 AS limited,
    a.attidentity <> '' OR a.attgenerated <> '' AS generated,
    a.attgenerated <> '' AS computed,
    a.attidentity <> '' OR coalesce(called.volatile, false) AS volatile,
    b.constrained OR b.defaulted OR a.attgenerated = '' AND (coalesce(called.own_code, false)
        OR NOT b.domain AND EXISTS (SELECT FROM pg_catalog.pg_attrdef f
            WHERE f.adrelid = a.attrelid AND f.adnum = a.attnum AND f.adbin::text ~ '{COERCETODOMAIN ')) AS own_code,
    NOT EXISTS (SELECT FROM trees WHERE tree ~ (':varattno (0|' || a.attnum || ') '))
        AND NOT EXISTS (SELECT FROM pg_catalog.pg_index i
            WHERE i.indrelid = a.attrelid AND a.attnum = ANY (i.indkey::int2[]))
        AND NOT EXISTS (SELECT FROM pg_catalog.pg_constraint f
            WHERE f.contype = 'f' AND f.conrelid = a.attrelid AND a.attnum = ANY (f.conkey)) AS unwatched
FROM base b
    JOIN pg_catalog.pg_type t ON t.oid = b.typ AND t.typtype <> 'd'
    JOIN pg_catalog.pg_attribute a ON a.attrelid = $1::int8::oid AND a.attnum = b.attnum
    JOIN pg_catalog.pg_type declared ON declared.oid = a.atttypid
    LEFT JOIN called ON called.adnum = a.attnum
ORDER BY a.attnum";

/// One row for each unique or exclusion index, the primary key's first. One that is not valid yet keeps rows out already.
pub(super) const INDEXES: &str = r"
SELECT i.indisprimary AS primary,
    i.indisunique AND NOT i.indisexclusion AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL
        AND i.indexprs IS NULL
        AND NOT EXISTS (SELECT FROM pg_catalog.unnest(i.indcollation::oid[]) AS c (id)
            JOIN pg_catalog.pg_collation l ON l.oid = c.id WHERE NOT l.collisdeterministic)
        AND NOT EXISTS (SELECT FROM pg_catalog.unnest(i.indclass::oid[]) AS c (id)
            JOIN pg_catalog.pg_opclass o ON o.oid = c.id WHERE o.opcnamespace <> 'pg_catalog'::regnamespace)
        AS plain,
    ARRAY(SELECT k.number FROM pg_catalog.unnest(i.indkey::int2[]) WITH ORDINALITY AS k (number, place)
        WHERE k.place <= i.indnkeyatts) AS keys,
    ARRAY(SELECT k.number FROM pg_catalog.unnest(i.indkey::int2[]) AS k (number) WHERE k.number > 0
        UNION
        SELECT d.refobjsubid::int2 FROM pg_catalog.pg_depend d
        WHERE d.classid = 'pg_catalog.pg_class'::regclass AND d.objid = i.indexrelid
            AND d.refclassid = 'pg_catalog.pg_class'::regclass AND d.refobjid = i.indrelid) AS uses
FROM pg_catalog.pg_index i WHERE i.indrelid = $1::int8::oid AND (i.indisunique OR i.indisexclusion)
ORDER BY i.indisprimary DESC, i.indexrelid";

/// One row for each foreign key from the table or to it. `alike`: one column refers to one, and both hold a value in the same
/// way, so that the one finds the other exactly where the client finds them equal.
pub(super) const LINKS: &str = r"
SELECT f.conrelid::int8 AS child, f.confrelid::int8 AS parent, f.conkey AS columns, f.confkey AS referenced,
    cardinality(f.conkey) = 1 AND c.atttypid = p.atttypid AND c.atttypmod = -1
        AND c.atttypid IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype, 'text'::regtype, 'varchar'::regtype, 'uuid'::regtype)
        AS alike
FROM pg_catalog.pg_constraint f
    JOIN pg_catalog.pg_attribute c ON c.attrelid = f.conrelid AND c.attnum = f.conkey[1]
    JOIN pg_catalog.pg_attribute p ON p.attrelid = f.confrelid AND p.attnum = f.confkey[1]
WHERE f.contype = 'f' AND $1::int8::oid IN (f.conrelid, f.confrelid)";

/// Whether there is a type of that name, and whether a cast to it may cut a value off: `char` and `bit` alone are of length 1,
/// and a domain may have a length.
pub(super) const CAST: &str = r"
WITH RECURSIVE named AS (
    SELECT t.typtype, t.typtypmod, t.typbasetype, t.typelem FROM pg_catalog.pg_type t WHERE t.oid = pg_catalog.to_regtype($1)
    UNION ALL
    SELECT t.typtype, t.typtypmod, t.typbasetype, t.typelem
    FROM named n JOIN pg_catalog.pg_type t ON t.oid = CASE n.typtype WHEN 'd' THEN n.typbasetype ELSE n.typelem END
)
SELECT pg_catalog.to_regtype($1) IS NOT NULL AS known,
    lower($1) ~ '^\s*(national\s+)?(n?char|character|bit)\s*(\[\s*\])?\s*$' OR EXISTS (
        SELECT FROM named n JOIN pg_catalog.pg_type b ON b.oid = n.typbasetype
        WHERE n.typtype = 'd' AND n.typtypmod <> -1 AND b.typcategory IN ('S', 'V')) AS cuts";
