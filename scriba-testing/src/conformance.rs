//! Conformance suites: what an adapter owes, as tests that its author instantiates.
//!
//! [`source`] is the suite for sources, [`target`] the one for targets. A rule that needs an ability is a test only where the bed
//! offers that ability; [`source::not_offered`] and [`target::not_offered`] list those that are none.

pub mod source;
pub mod target;
mod wait;

/// Runs a rule of a suite on a runtime of its own; what the generated tests call.
///
/// # Panics
/// When the rule is broken, or no runtime can be made.
pub fn run(rule: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime for the test").block_on(rule);
}

/// Rules of abilities that are not offered, each with the ability it needs.
fn not_offered(rules: &[(&'static str, &[&'static str])], offered: &[&str]) -> Vec<(&'static str, &'static str)> {
    let known = |ability: &&str| rules.iter().any(|(known, _)| known == ability);
    assert!(offered.iter().all(known), "there are these abilities, and not all of {offered:?}: {rules:#?}");
    let missing = rules.iter().filter(|(ability, _)| !offered.contains(ability));
    missing.flat_map(|(ability, rules)| rules.iter().map(|rule| (*rule, *ability))).collect()
}

/// Makes the tests of a suite: those of every adapter, and those of the abilities that are offered. For `source_conformance!`
/// and `target_conformance!` only.
///
/// The lists of abilities meet inside macros made on the spot, whose arms are what is offered.
#[doc(hidden)]
#[macro_export]
macro_rules! conformance_tests {
    (@of ([$dollar:tt] $suite:ident [$bed:ty] [$($offered:ident)*])
        always { $($always:ident)+ } $($ability:ident { $($rule:ident)+ })+
    ) => {
        macro_rules! known {
            () => {};
            $(($ability) => {};)+
            ($dollar other:ident) => {
                compile_error!(concat!(
                    "`", stringify!($dollar other), "` is no ability: the documentation of scriba_testing::conformance::",
                    stringify!($suite), " lists them"
                ));
            };
        }
        known!();
        $(known!($offered);)*
        macro_rules! where_offered {
            $(($offered $dollar($dollar tests:tt)*) => { $dollar($dollar tests)* };)*
            ($dollar($dollar tests:tt)*) => {};
        }
        $(
            #[test]
            fn $always() {
                $crate::conformance::run($crate::conformance::$suite::$always::<$bed>());
            }
        )+
        $(
            where_offered! { $ability
                $(
                    #[test]
                    fn $rule() {
                        $crate::conformance::run($crate::conformance::$suite::$rule::<$bed>());
                    }
                )+
            }
        )+
    };
}

/// The rules of a suite by ability, without those of every adapter.
macro_rules! rules_by_ability {
    (@of () always $always:tt $($ability:ident { $($rule:ident)+ })+) => {
        [$((stringify!($ability), [$(stringify!($rule)),+].as_slice())),+]
    };
}
use rules_by_ability;
