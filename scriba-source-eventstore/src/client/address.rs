//! Connection strings: what the crates make of them, and what they should.

/// Says what is wrong in the words of a client crate, without what stands in the string: a password with a `/` in it ends
/// up in any part.
pub(super) fn what_is_wrong(message: &str, url: Option<&url::ParseError>) -> String {
    let Some(error) = url else {
        return [". value", " value '", ": "]
            .iter()
            .fold(message, |text, cut| text.split(cut).next().unwrap_or(text))
            .to_owned();
    };
    format!("{error} (in a user or password, write / ? # @ : , as %2F %3F %23 %40 %3A %2C)")
}

/// User and password of a connection string. The crates take them as they are written there, where some characters cannot
/// be written but as `%40`, and send that.
pub(super) fn credentials(connection_string: &str) -> Option<(Vec<u8>, Vec<u8>)> {
    let (_, rest) = connection_string.split_once("://")?;
    let authority = rest.split(['/', '?', '#']).next()?;
    let (credentials, _) = authority.rsplit_once('@')?;
    let (user, password) = credentials.split_once(':').unwrap_or((credentials, ""));
    (!user.is_empty()).then(|| (decoded(user), decoded(password)))
}

/// How long a client waits before each attempt to connect, the first one too: 500 ms unless it is told. A subscription that ended has
/// a new client, so that would be added to every take-over; how long to wait after a failure is for the engine to say.
const BEFORE_AN_ATTEMPT: &str = "discoveryInterval=50";

/// A connection string that says how long to wait before an attempt.
pub(super) fn hastened(connection_string: &str) -> String {
    if connection_string.to_ascii_lowercase().contains("discoveryinterval=") {
        return connection_string.to_owned();
    }
    let separator = if connection_string.contains('?') { '&' } else { '?' };
    format!("{connection_string}{separator}{BEFORE_AN_ATTEMPT}")
}

fn decoded(text: &str) -> Vec<u8> {
    percent_encoding::percent_decode_str(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_that_the_user_wants_is_kept() {
        let hastened_to = |string: &str| hastened(&format!("esdb://{string}"));
        assert_eq!(hastened_to("host:2113"), "esdb://host:2113?discoveryInterval=50");
        assert_eq!(hastened_to("a:1,b:2/?tls=true"), "esdb://a:1,b:2/?tls=true&discoveryInterval=50");
        assert_eq!(hastened_to("host?DiscoveryInterval=900&tls=false"), "esdb://host?DiscoveryInterval=900&tls=false");
    }

    #[cfg(feature = "kurrentdb")]
    #[test]
    fn what_is_hastened_is_still_a_connection_string() {
        for (string, nodes) in [("esdb://host", 1), ("esdb://a:1,b:2", 2), ("esdb+discover://u:p@host:2113", 1)] {
            let settings: ::kurrentdb::ClientSettings = hastened(string).parse().unwrap();
            assert_eq!(settings.hosts().len(), nodes, "{string}");
            assert_eq!(settings.discovery_interval().as_millis(), 50, "{string}");
        }
    }

    #[test]
    fn credentials_are_what_the_server_compares() {
        let of = |string: &str| {
            credentials(string)
                .map(|(user, password)| (String::from_utf8(user).unwrap(), String::from_utf8(password).unwrap()))
        };
        let some = |user: &str, password: &str| Some((user.to_owned(), password.to_owned()));
        assert_eq!(of("esdb://admin:changeit@host:2113?tls=false"), some("admin", "changeit"));
        assert_eq!(of("esdb+discover://a%40b:%2F%3f%25:x%zz%4@h1:1,h2:2/?tls=true"), some("a@b", "/?%:x%zz%4"));
        assert_eq!(of("esdb://admin:p@ss^word@host"), some("admin", "p@ss^word"));
        assert_eq!(of("esdb://admin@host"), some("admin", ""));
        assert_eq!(of("esdb://host:2113?connectionName=a@b"), None);
        assert_eq!(of("esdb://:nobody@host"), None);
        assert_eq!(of("host"), None);
    }
}
