//! How often pipelines may end with nothing committed between them. Pure but for the clock.

use tokio::time::Instant;

use super::trouble::TroubleKind;

/// Ends of pipelines since something was committed, by kind: an outage between two panics does not make the count begin anew.
#[derive(Default)]
pub(super) struct Fruitless(Vec<Ends>);

struct Ends {
    kind: TroubleKind,
    times: u32,
    since: Instant,
}

impl Fruitless {
    /// Counts one more. Answers how many there were when that is one too many.
    pub(super) fn one_too_many(&mut self, kind: TroubleKind) -> Option<u32> {
        let (limit, over) = kind.limit()?;
        let at = self.0.iter().position(|ends| ends.kind == kind).unwrap_or_else(|| {
            self.0.push(Ends { kind, times: 0, since: Instant::now() });
            self.0.len() - 1
        });
        let ends = &mut self.0[at];
        ends.times = ends.times.saturating_add(1);
        (ends.times >= limit && ends.since.elapsed() >= over).then_some(ends.times)
    }

    /// Something was committed.
    pub(super) fn forget(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_kind_halts_at_its_own_limit_and_an_outage_never() {
        for (kind, limit, over) in [
            (TroubleKind::Unclear, 3, Duration::ZERO),
            (TroubleKind::Unknown, 10, Duration::ZERO),
            (TroubleKind::Statement, 5, Duration::from_mins(5)),
        ] {
            let mut fruitless = Fruitless::default();
            for _ in 1..limit {
                assert_eq!(fruitless.one_too_many(kind), None, "{kind:?}");
            }
            if over.is_zero() {
                assert_eq!(fruitless.one_too_many(kind), Some(limit), "{kind:?}");
            } else {
                assert_eq!(fruitless.one_too_many(kind), None, "{kind:?}: too early");
                tokio::time::advance(over).await;
                assert_eq!(fruitless.one_too_many(kind), Some(limit + 1), "{kind:?}");
            }
        }
        let mut fruitless = Fruitless::default();
        for _ in 0..10_000 {
            assert_eq!(fruitless.one_too_many(TroubleKind::Outage), None);
            assert_eq!(fruitless.one_too_many(TroubleKind::Source), None);
        }
    }

    #[test]
    fn an_outage_between_panics_does_not_make_the_count_begin_anew_and_a_commit_does() {
        let mut fruitless = Fruitless::default();
        for _ in 0..9 {
            assert_eq!(fruitless.one_too_many(TroubleKind::Unknown), None);
            assert_eq!(fruitless.one_too_many(TroubleKind::Outage), None);
        }
        fruitless.forget();
        for _ in 0..9 {
            assert_eq!(fruitless.one_too_many(TroubleKind::Unknown), None);
            assert_eq!(fruitless.one_too_many(TroubleKind::Source), None);
        }
        assert_eq!(fruitless.one_too_many(TroubleKind::Unknown), Some(10));
    }
}
