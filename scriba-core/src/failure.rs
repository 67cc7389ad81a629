//! Which failures end how: every decision reads a class, and the class is read off a SQLSTATE here.

use std::fmt;

/// The class of a failure in a target, which decides the response.
///
/// | class | what it is | response |
/// |---|---|---|
/// | transient: server | the server or the connection is gone | replay with backoff, for as long as it takes |
/// | transient: statement | a deadlock, a timeout, a lock | replay with backoff, for as long as it takes |
/// | integrity | one event's data breaks a rule of the database | halt, naming it |
/// | unclear | may go away on a new connection | three tries, each on a fresh connection, then halt |
/// | structural | tables, columns, rights; everything unknown | halt |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureClass {
    /// The server or the connection.
    TransientServer,
    /// This statement, this time.
    TransientStatement,
    /// The data of one event.
    Integrity,
    /// Possibly the connection's state.
    Unclear,
    /// Schema, rights, or unknown.
    Structural,
}

impl fmt::Display for FailureClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TransientServer => "transient (server)",
            Self::TransientStatement => "transient (statement)",
            Self::Integrity => "integrity",
            Self::Unclear => "unclear",
            Self::Structural => "structural",
        })
    }
}

/// SQLSTATEs that the engine or an adapter names. Meanings: PostgreSQL 15 documentation, Appendix A.
pub mod sqlstate {
    /// A closure or statement ran in a transaction that had already failed.
    pub const IN_FAILED_SQL_TRANSACTION: &str = "25P02";
    /// The database is read-only (a standby, or by setting).
    pub const READ_ONLY_SQL_TRANSACTION: &str = "25006";
    /// `idle_in_transaction_session_timeout` ended the session.
    pub const IDLE_IN_TRANSACTION_SESSION_TIMEOUT: &str = "25P03";
    /// `transaction_timeout` ended the session (PostgreSQL 17).
    pub const TRANSACTION_TIMEOUT: &str = "25P04";
    /// The protocol was violated: the connection's state is not known.
    pub const PROTOCOL_VIOLATION: &str = "08P01";
    /// The database was dropped.
    pub const DATABASE_DROPPED: &str = "57P04";
    /// `statement_timeout`, or cancelled by an operator.
    pub const QUERY_CANCELED: &str = "57014";
    /// `max_connections` is used up.
    pub const TOO_MANY_CONNECTIONS: &str = "53300";
    /// `lock_timeout`.
    pub const LOCK_NOT_AVAILABLE: &str = "55P03";
    /// A statement touched a row twice that it may touch once.
    pub const CARDINALITY_VIOLATION: &str = "21000";
    /// A feature is missing; "cached plan must not change result type" comes under it.
    pub const FEATURE_NOT_SUPPORTED: &str = "0A000";
    /// A prepared statement is gone.
    pub const INVALID_SQL_STATEMENT_NAME: &str = "26000";
    /// Internal error.
    pub const INTERNAL_ERROR: &str = "XX000";
    /// Rights are missing.
    pub const INSUFFICIENT_PRIVILEGE: &str = "42501";
    /// A table is missing.
    pub const UNDEFINED_TABLE: &str = "42P01";
    /// A function is missing.
    pub const UNDEFINED_FUNCTION: &str = "42883";
}

/// The class of a SQLSTATE with the message it came with.
///
/// | class | codes |
/// |---|---|
/// | transient: server | 08 (but 08P01), 57P0x (but 57P04), 53300, 25006, 25P03, 25P04 |
/// | transient: statement | 40, 53 otherwise, 55P03, 57014 |
/// | integrity | 22, 23, 44, 54, 21000, P0001 to P0004, 38, 42501 from row-level security, 25P02 |
/// | unclear | 0A000 "cached plan", 26000, XX000, 08P01, 57P04 |
/// | structural | 42 otherwise, everything unknown |
pub fn classify(code: &str, message: &str) -> FailureClass {
    use FailureClass::{Integrity, Structural, TransientServer, TransientStatement, Unclear};
    match code {
        sqlstate::PROTOCOL_VIOLATION
        | sqlstate::DATABASE_DROPPED
        | sqlstate::INVALID_SQL_STATEMENT_NAME
        | sqlstate::INTERNAL_ERROR => Unclear,
        sqlstate::FEATURE_NOT_SUPPORTED if message.contains("cached plan") => Unclear,
        sqlstate::TOO_MANY_CONNECTIONS
        | sqlstate::READ_ONLY_SQL_TRANSACTION
        | sqlstate::IDLE_IN_TRANSACTION_SESSION_TIMEOUT
        | sqlstate::TRANSACTION_TIMEOUT => TransientServer,
        sqlstate::LOCK_NOT_AVAILABLE | sqlstate::QUERY_CANCELED => TransientStatement,
        sqlstate::CARDINALITY_VIOLATION
        | sqlstate::IN_FAILED_SQL_TRANSACTION
        | "P0001"
        | "P0002"
        | "P0003"
        | "P0004" => Integrity,
        // The server words it so in every locale's source text; with translated messages the class is structural,
        // which halts: late to the right answer, never past it.
        sqlstate::INSUFFICIENT_PRIVILEGE if message.contains("row-level security") => Integrity,
        _ if code.starts_with("08") || code.starts_with("57P0") => TransientServer,
        _ if code.starts_with("40") || code.starts_with("53") => TransientStatement,
        _ if ["22", "23", "44", "54", "38"].iter().any(|class| code.starts_with(class)) => Integrity,
        _ => Structural,
    }
}

#[cfg(test)]
mod tests {
    use super::FailureClass::{Integrity, Structural, TransientServer, TransientStatement, Unclear};
    use super::*;

    #[test]
    fn every_row_of_the_table_and_each_exception_to_it() {
        let rows = [
            ("08006", "", TransientServer),
            ("08P01", "", Unclear),
            ("57P01", "", TransientServer),
            ("57P03", "", TransientServer),
            ("57P04", "", Unclear),
            ("53300", "", TransientServer),
            ("25006", "", TransientServer),
            ("25P03", "", TransientServer),
            ("25P04", "", TransientServer),
            ("40001", "", TransientStatement),
            ("40P01", "", TransientStatement),
            ("53100", "", TransientStatement),
            ("53200", "", TransientStatement),
            ("55P03", "", TransientStatement),
            ("57014", "", TransientStatement),
            ("22001", "", Integrity),
            ("22021", "", Integrity),
            ("23505", "", Integrity),
            ("44000", "", Integrity),
            ("54000", "", Integrity),
            ("21000", "", Integrity),
            ("P0001", "", Integrity),
            ("P0004", "", Integrity),
            ("38000", "", Integrity),
            ("25P02", "", Integrity),
            ("42501", "new row violates row-level security policy for table \"t\"", Integrity),
            ("42501", "permission denied for table t", Structural),
            ("0A000", "cached plan must not change result type", Unclear),
            ("0A000", "cannot do that", Structural),
            ("26000", "", Unclear),
            ("XX000", "", Unclear),
            ("42P01", "", Structural),
            ("42703", "", Structural),
            ("99999", "", Structural),
            ("", "", Structural),
        ];
        for (code, message, class) in rows {
            assert_eq!(classify(code, message), class, "{code} {message}");
        }
    }
}
