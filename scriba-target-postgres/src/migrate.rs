//! The control tables: bringing them up, taking them down, writing the files out, and looking whether they are there.

use std::path::{Path, PathBuf};

use scriba_core::FailureClass;
use scriba_core::target::TargetError;
use sqlx::{Connection, PgConnection, raw_sql};

use crate::names::{Names, identifier, literal};
use crate::sqlstate::target_error;

struct Migration {
    /// The name of its files up to `.up.sql` and `.down.sql`, as `sqlx migrate` reads it.
    name: &'static str,
    up: &'static str,
    down: &'static str,
}

const MIGRATIONS: &[Migration] = &[Migration {
    name: "1_scriba",
    up: include_str!("../migrations/1_scriba.up.sql"),
    down: include_str!("../migrations/1_scriba.down.sql"),
}];

/// The version that the migrations end at; `scriba_schema_version()` answers it.
const WANTED: i32 = 1;

const TABLES: [&str; 5] =
    ["scriba_checkpoints", "scriba_leases", "scriba_standbys", "scriba_projections", "scriba_dead_letters"];

const FUNCTIONS: [&str; 3] = ["scriba_advance", "scriba_check_commit", "scriba_readable_json"];

/// On the checkpoints; behind the prefix.
const TRIGGER: &str = "commit_guard";

/// One at a time among all nodes of a database, whatever their schemas and prefixes.
const LOCK: i64 = 0x5C21_BA00_0000_0001;

const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";

/// Applies all migrations if the tables are not there in the wanted version.
pub(crate) async fn up(conn: &mut PgConnection, names: &Names) -> Result<(), TargetError> {
    names.validate()?;
    let failed = |error: sqlx::Error| target_error(&error, "migrating the control tables");
    let mut tx = conn.begin_with(BEGIN).await.map_err(failed)?;
    lock(&mut tx).await.map_err(failed)?;
    let found = Found::read(&mut tx, names).await?;
    if found.is_newer() {
        return found.verdict();
    }
    if found.verdict().is_err() {
        // Every migration can be applied again, which is also what mends tables that are half there.
        for text in std::iter::once(create_schema(names)).chain(MIGRATIONS.iter().map(|m| names.substitute(m.up))) {
            raw_sql(sqlx::AssertSqlSafe(text)).execute(&mut *tx).await.map_err(failed)?;
        }
    }
    tx.commit().await.map_err(failed)
}

/// Takes all migrations back, the newest first.
pub(crate) async fn down(conn: &mut PgConnection, names: &Names) -> Result<(), TargetError> {
    names.validate()?;
    let failed = |error: sqlx::Error| target_error(&error, "taking the control tables down");
    let mut tx = conn.begin_with(BEGIN).await.map_err(failed)?;
    lock(&mut tx).await.map_err(failed)?;
    for migration in MIGRATIONS.iter().rev() {
        raw_sql(names.sql(migration.down)).execute(&mut *tx).await.map_err(failed)?;
    }
    tx.commit().await.map_err(failed)
}

/// Writes the files, with this target's names in them.
pub(crate) fn export(names: &Names, dir: &Path) -> std::io::Result<Vec<PathBuf>> {
    names.validate().map_err(|error| std::io::Error::new(std::io::ErrorKind::InvalidInput, error))?;
    std::fs::create_dir_all(dir)?;
    let mut written = Vec::new();
    for migration in MIGRATIONS {
        let up = format!("{}{}", create_schema(names), names.substitute(migration.up));
        for (direction, text) in [("up", up), ("down", names.substitute(migration.down))] {
            let path = dir.join(format!("{}.{direction}.sql", migration.name));
            std::fs::write(&path, text)?;
            written.push(path);
        }
    }
    Ok(written)
}

/// Looks whether tables and functions are there in the wanted version.
pub(crate) async fn check(conn: &mut PgConnection, names: &Names) -> Result<(), TargetError> {
    names.validate()?;
    Found::read(conn, names).await?.verdict()
}

async fn lock(conn: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(LOCK).execute(conn).await.map(drop)
}

/// The statement that creates the schema where there is one to create. `CREATE SCHEMA IF NOT EXISTS` would
/// ask for the right to create schemas even where it exists.
fn create_schema(names: &Names) -> String {
    names.schema.as_ref().map_or_else(String::new, |schema| {
        let name = identifier(schema);
        format!(
            "DO $body$ BEGIN IF to_regnamespace({}) IS NULL THEN CREATE SCHEMA {name}; END IF; END $body$;\n\n",
            literal(&name)
        )
    })
}

/// What stands in the database.
struct Found {
    /// Kind and name of what is not there.
    missing: Vec<String>,
    /// What the version function answers, where there is one.
    version: Option<i32>,
}

impl Found {
    async fn read(conn: &mut PgConnection, names: &Names) -> Result<Self, TargetError> {
        let failed = |error: sqlx::Error| target_error(&error, "looking for the control tables");
        let quoted = |tokens: &[&str]| tokens.iter().map(|token| names.quoted(token)).collect::<Vec<_>>();
        // to_regproc answers NULL for a name with several functions too; nobody else's may be called like these.
        let missing = sqlx::query_scalar(
            "SELECT 'table ' || name FROM unnest($1::text[]) AS name WHERE to_regclass(name) IS NULL \
             UNION ALL \
             SELECT 'function ' || name FROM unnest($2::text[]) AS name WHERE to_regproc(name) IS NULL \
             UNION ALL \
             SELECT 'trigger ' || $3 WHERE NOT EXISTS (SELECT FROM pg_trigger \
                WHERE tgrelid = to_regclass($4) AND tgname = $3 AND tgenabled <> 'D')",
        )
        .bind(quoted(&TABLES))
        .bind(quoted(&FUNCTIONS))
        .bind(format!("{}{TRIGGER}", names.prefix))
        .bind(names.quoted(TABLES[0]))
        .fetch_all(&mut *conn)
        .await
        .map_err(failed)?;
        let versioned: bool = sqlx::query_scalar("SELECT to_regproc($1) IS NOT NULL")
            .bind(names.quoted("scriba_schema_version"))
            .fetch_one(&mut *conn)
            .await
            .map_err(failed)?;
        let version = if versioned {
            let text = names.sql("SELECT scriba_schema_version()");
            Some(sqlx::query_scalar(text).fetch_one(conn).await.map_err(failed)?)
        } else {
            None
        };
        Ok(Self { missing, version })
    }

    fn is_newer(&self) -> bool {
        self.version.is_some_and(|version| version > WANTED)
    }

    fn verdict(&self) -> Result<(), TargetError> {
        if self.missing.is_empty() && self.version == Some(WANTED) {
            return Ok(());
        }
        let version = self.version.map_or_else(|| "none".to_owned(), |version| version.to_string());
        let missing = if self.missing.is_empty() {
            String::new()
        } else {
            format!(", and these are missing: {}", self.missing.join(", "))
        };
        let remedy = if self.is_newer() {
            "run a newer Scriba on them"
        } else {
            "run `PgTarget::migrate`, or apply the SQL files that `PgTarget::export_migrations` writes \
             (`sqlx migrate run --source <dir>`)"
        };
        Err(TargetError::new(
            FailureClass::Structural,
            format!("the control tables are of version {version}, wanted is version {WANTED}{missing}: {remedy}"),
        ))
    }
}
