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

fn decoded(text: &str) -> Vec<u8> {
    percent_encoding::percent_decode_str(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
