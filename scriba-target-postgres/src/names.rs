//! How the control tables are called: SQL texts name them by `scriba_…` tokens, which become the quoted names of one
//! target here and nowhere else.

use scriba_core::FailureClass;
use scriba_core::target::TargetError;
use sqlx::AssertSqlSafe;

/// The token that texts write for the prefix, and the prefix where nothing is said.
const PREFIX: &str = "scriba_";

/// Postgres cuts longer identifiers off without an error.
const LONGEST_IDENTIFIER: usize = 63;

/// The longest of the names after the prefix.
const LONGEST_SUFFIX: &str = "dead_letters_stream_idx";

/// Schema and prefix of one target's control tables.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    pub(crate) schema: Option<String>,
    pub(crate) prefix: String,
}

impl Default for Names {
    fn default() -> Self {
        Self { schema: None, prefix: PREFIX.to_owned() }
    }
}

impl Names {
    /// A text with its tokens replaced, ready to be sent. Texts hold names and numbers of this crate's own; everything
    /// else in them has gone through [`literal`] or travels as a bind.
    pub(crate) fn sql(&self, text: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(self.substitute(text))
    }

    /// A text with its `scriba_…` tokens replaced by quoted names. Indexes and triggers stand in their table's schema and may
    /// not be qualified where they are created, so tokens that end in `_idx` or `_guard` stay without schema.
    pub(crate) fn substitute(&self, text: &str) -> String {
        if self.schema.is_none() && self.prefix == PREFIX {
            return text.to_owned();
        }
        let mut out = String::with_capacity(text.len() * 2);
        let mut rest = text;
        while let Some(at) = rest.find(PREFIX) {
            let starts_word = !rest[..at].ends_with(is_word);
            let end = rest[at..].find(|c| !is_word(c)).map_or(rest.len(), |length| at + length);
            out.push_str(&rest[..at]);
            if starts_word {
                out.push_str(&self.quoted(&rest[at..end]));
            } else {
                out.push_str(&rest[at..end]);
            }
            rest = &rest[end..];
        }
        out.push_str(rest);
        out
    }

    /// The quoted name that a token stands for.
    pub(crate) fn quoted(&self, token: &str) -> String {
        let name = identifier(&format!("{}{}", self.prefix, token.strip_prefix(PREFIX).unwrap_or(token)));
        match &self.schema {
            Some(schema) if !token.ends_with("_idx") && !token.ends_with("_guard") => {
                format!("{}.{name}", identifier(schema))
            }
            _ => name,
        }
    }

    /// The quoted name of a constraint trigger with its schema, as SET CONSTRAINTS wants it.
    pub(crate) fn constraint(&self, token: &str) -> String {
        let name = self.quoted(token);
        self.schema.as_ref().map_or_else(|| name.clone(), |schema| format!("{}.{name}", identifier(schema)))
    }

    /// Refuses what cannot be a name.
    pub(crate) fn validate(&self) -> Result<(), TargetError> {
        let refuse = |what: &str, name: &str, why: &str| {
            Err(TargetError::new(FailureClass::Structural, format!("{what} {name:?} {why}: choose another")))
        };
        for (what, name) in [("schema", self.schema.as_deref()), ("table prefix", Some(self.prefix.as_str()))] {
            let Some(name) = name else { continue };
            if name.is_empty() {
                return refuse(what, name, "is empty");
            }
            // A dollar sign could end the quoted body of a function.
            if name.contains(['\0', '$']) {
                return refuse(what, name, "holds a NUL or a dollar sign");
            }
        }
        if self.schema.as_ref().is_some_and(|schema| schema.len() > LONGEST_IDENTIFIER) {
            return refuse("schema", self.schema.as_deref().unwrap_or_default(), "is longer than 63 bytes");
        }
        if self.prefix.len() + LONGEST_SUFFIX.len() > LONGEST_IDENTIFIER {
            return refuse("table prefix", &self.prefix, "makes table names longer than 63 bytes");
        }
        Ok(())
    }
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// An identifier, quoted.
pub(crate) fn identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// A string literal that means the same whatever `standard_conforming_strings` says.
pub(crate) fn literal(text: &str) -> String {
    format!("E'{}'", storable(text).replace('\\', "\\\\").replace('\'', "''"))
}

/// A text as `text` columns can hold it: NUL, which Postgres refuses, becomes its visible sign.
pub(crate) fn storable(text: &str) -> String {
    text.replace('\0', "\u{2400}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_become_quoted_names_everywhere_and_default_names_leave_a_text_as_it_is() {
        let text = "CREATE INDEX scriba_a_idx ON scriba_a (x); UPDATE scriba_a AS c; SELECT scriba_f(), my_scriba_x";
        assert_eq!(Names::default().substitute(text), text);
        let names = Names { schema: Some("Read \"Models\"".to_owned()), prefix: "p_".to_owned() };
        assert_eq!(
            names.substitute(text),
            "CREATE INDEX \"p_a_idx\" ON \"Read \"\"Models\"\"\".\"p_a\" (x); \
             UPDATE \"Read \"\"Models\"\"\".\"p_a\" AS c; SELECT \"Read \"\"Models\"\"\".\"p_f\"(), my_scriba_x"
        );
    }

    #[test]
    fn names_that_postgres_would_cut_or_that_would_end_a_function_body_are_refused() {
        let with =
            |schema: Option<&str>, prefix: &str| Names { schema: schema.map(str::to_owned), prefix: prefix.to_owned() };
        assert!(with(Some("x"), "p_").validate().is_ok());
        assert!(with(None, &"p".repeat(40)).validate().is_ok());
        assert!(with(None, &"p".repeat(41)).validate().is_err());
        assert!(with(Some(&"s".repeat(64)), "p_").validate().is_err());
        assert!(with(None, "a$body$").validate().is_err());
        assert!(with(Some("a\0"), "p_").validate().is_err());
        assert!(with(Some(""), "p_").validate().is_err());
    }

    #[test]
    fn a_literal_holds_quotes_backslashes_and_nul() {
        assert_eq!(literal("it's \\ \0"), "E'it''s \\\\ \u{2400}'");
    }
}
