//! Scriba target: read models in Postgres.
