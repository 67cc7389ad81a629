//! Which failures end how: every decision reads a class, and the class is read off a SQLSTATE here.

use std::fmt;

/// The class of a failure in a target, which decides the response.
///
/// | class | what it is | response |
/// |---|---|---|
/// | transient: server | the server or the connection is gone | replay with backoff, for as long as it takes |
/// | transient: statement | a deadlock, a timeout, a lock | the same with half the batch; one event alone, five times over five minutes, halts |
/// | integrity | one event's data breaks a rule of the database | that event alone is dead-lettered |
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

impl FailureClass {
    /// The class that is displayed so.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::TransientServer, Self::TransientStatement, Self::Integrity, Self::Unclear, Self::Structural]
            .into_iter()
            .find(|class| class.to_string() == name)
    }
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
    /// A column is missing.
    pub const UNDEFINED_COLUMN: &str = "42703";
    /// A type or another object is missing.
    pub const UNDEFINED_OBJECT: &str = "42704";
    /// A function is missing.
    pub const UNDEFINED_FUNCTION: &str = "42883";

    /// The condition name of a code that one event's data can lead to, as PostgreSQL 15 names it (documentation, Appendix A).
    pub fn condition(code: &str) -> Option<&'static str> {
        Some(match code {
            "21000" => "cardinality_violation",
            "22000" => "data_exception",
            "2202E" => "array_subscript_error",
            "22021" => "character_not_in_repertoire",
            "22008" => "datetime_field_overflow",
            "22012" => "division_by_zero",
            "22005" => "error_in_assignment",
            "2200B" => "escape_character_conflict",
            "22022" => "indicator_overflow",
            "22015" => "interval_field_overflow",
            "2201E" => "invalid_argument_for_logarithm",
            "22014" => "invalid_argument_for_ntile_function",
            "22016" => "invalid_argument_for_nth_value_function",
            "2201F" => "invalid_argument_for_power_function",
            "2201G" => "invalid_argument_for_width_bucket_function",
            "22018" => "invalid_character_value_for_cast",
            "22007" => "invalid_datetime_format",
            "22019" => "invalid_escape_character",
            "2200D" => "invalid_escape_octet",
            "22025" => "invalid_escape_sequence",
            "22P06" => "nonstandard_use_of_escape_character",
            "22010" => "invalid_indicator_parameter_value",
            "22023" => "invalid_parameter_value",
            "22013" => "invalid_preceding_or_following_size",
            "2201B" => "invalid_regular_expression",
            "2201W" => "invalid_row_count_in_limit_clause",
            "2201X" => "invalid_row_count_in_result_offset_clause",
            "2202H" => "invalid_tablesample_argument",
            "2202G" => "invalid_tablesample_repeat",
            "22009" => "invalid_time_zone_displacement_value",
            "2200C" => "invalid_use_of_escape_character",
            "2200G" => "most_specific_type_mismatch",
            "22004" => "null_value_not_allowed",
            "22002" => "null_value_no_indicator_parameter",
            "22003" => "numeric_value_out_of_range",
            "2200H" => "sequence_generator_limit_exceeded",
            "22026" => "string_data_length_mismatch",
            "22001" => "string_data_right_truncation",
            "22011" => "substring_error",
            "22027" => "trim_error",
            "22024" => "unterminated_c_string",
            "2200F" => "zero_length_character_string",
            "22P01" => "floating_point_exception",
            "22P02" => "invalid_text_representation",
            "22P03" => "invalid_binary_representation",
            "22P04" => "bad_copy_file_format",
            "22P05" => "untranslatable_character",
            "2200L" => "not_an_xml_document",
            "2200M" => "invalid_xml_document",
            "2200N" => "invalid_xml_content",
            "2200S" => "invalid_xml_comment",
            "2200T" => "invalid_xml_processing_instruction",
            "22030" => "duplicate_json_object_key_value",
            "22031" => "invalid_argument_for_sql_json_datetime_function",
            "22032" => "invalid_json_text",
            "22033" => "invalid_sql_json_subscript",
            "22034" => "more_than_one_sql_json_item",
            "22035" => "no_sql_json_item",
            "22036" => "non_numeric_sql_json_item",
            "22037" => "non_unique_keys_in_a_json_object",
            "22038" => "singleton_sql_json_item_required",
            "22039" => "sql_json_array_not_found",
            "2203A" => "sql_json_member_not_found",
            "2203B" => "sql_json_number_not_found",
            "2203C" => "sql_json_object_not_found",
            "2203D" => "too_many_json_array_elements",
            "2203E" => "too_many_json_object_members",
            "2203F" => "sql_json_scalar_required",
            "2203G" => "sql_json_item_cannot_be_cast_to_target_type",
            "23000" => "integrity_constraint_violation",
            "23001" => "restrict_violation",
            "23502" => "not_null_violation",
            "23503" => "foreign_key_violation",
            "23505" => "unique_violation",
            "23514" => "check_violation",
            "23P01" => "exclusion_violation",
            "25P02" => "in_failed_sql_transaction",
            "38000" => "external_routine_exception",
            "38001" => "containing_sql_not_permitted",
            "38002" => "modifying_sql_data_not_permitted",
            "38003" => "prohibited_sql_statement_attempted",
            "38004" => "reading_sql_data_not_permitted",
            "42501" => "insufficient_privilege",
            "44000" => "with_check_option_violation",
            "54000" => "program_limit_exceeded",
            "54001" => "statement_too_complex",
            "54011" => "too_many_columns",
            "54023" => "too_many_arguments",
            "P0000" => "plpgsql_error",
            "P0001" => "raise_exception",
            "P0002" => "no_data_found",
            "P0003" => "too_many_rows",
            "P0004" => "assert_failure",
            _ => return None,
        })
    }
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
