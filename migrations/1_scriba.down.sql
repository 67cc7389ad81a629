-- Takes the control tables of Scriba away, with every checkpoint and dead letter. Can be applied again.
DROP FUNCTION IF EXISTS scriba_schema_version();
DROP FUNCTION IF EXISTS scriba_advance(text, bigint, bigint, bigint, bigint, bigint, text, bigint, bigint, bigint, bigint, bigint[]);
DROP FUNCTION IF EXISTS scriba_readable_json(bytea);
DROP TABLE IF EXISTS scriba_dead_letters;
DROP TABLE IF EXISTS scriba_projections;
DROP TABLE IF EXISTS scriba_standbys;
DROP TABLE IF EXISTS scriba_leases;
DROP TABLE IF EXISTS scriba_checkpoints;
DROP FUNCTION IF EXISTS scriba_check_commit();
