//! What a failure of the client means for the source.

use std::fmt::Display;

use scriba_core::source::SourceError;

use crate::client::Failure;

/// The source's error for one of the client: `whom` names store, stream and group, `doing` what was tried.
pub(crate) fn source_error(whom: impl Display, doing: &str, failure: &Failure) -> SourceError {
    let at = |remedy: &str| format!("{whom}: {doing}: {failure}{remedy}");
    match failure {
        Failure::Unavailable(_) | Failure::Dead(_) | Failure::NotLeader(_) => SourceError::unavailable(at("")),
        Failure::Dropped | Failure::Ended | Failure::Missing | Failure::Exists | Failure::Other(_) => {
            SourceError::ended(at(""))
        }
        Failure::Denied => SourceError::unusable(at(
            ": correct user and password in the connection string, or let that user do it in the access control list; to create and \
             delete groups a user has to be in $ops or $admins",
        )),
        Failure::Deleted => SourceError::unusable(at(
            ": nothing will ever stand there again; read another stream, under a new version of the projection",
        )),
        Failure::Unfit(_) => SourceError::unusable(at("")),
        Failure::Full => SourceError::held(format!("another subscriber of {whom}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(failure: &Failure) -> SourceError {
        source_error("group g on stream s of db", "join the group", failure)
    }

    #[test]
    fn an_outage_is_waited_out_and_an_end_leads_to_a_new_subscription() {
        let text = || "no answer".to_owned();
        for outage in [Failure::Unavailable(text()), Failure::Dead(text()), Failure::NotLeader(text())] {
            assert!(matches!(error(&outage), SourceError::Unavailable { .. }));
        }
        for end in [Failure::Dropped, Failure::Ended, Failure::Missing, Failure::Exists, Failure::Other(text())] {
            assert!(matches!(error(&end), SourceError::Ended { .. }));
        }
    }

    #[test]
    fn what_no_new_attempt_mends_says_whom_it_concerns_and_the_remedy() {
        let Err(SourceError::Unusable { message }) = Err::<(), _>(error(&Failure::Denied)) else {
            panic!("not refused")
        };
        assert!(message.starts_with("group g on stream s of db: join the group: access denied: correct"), "{message}");
        assert!(matches!(error(&Failure::Deleted), SourceError::Unusable { .. }));
    }

    #[test]
    fn a_full_group_is_held_by_another_subscriber() {
        let held = error(&Failure::Full).to_string();
        assert_eq!(held, "held by another subscriber of group g on stream s of db");
    }
}
