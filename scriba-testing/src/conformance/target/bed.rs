//! What an adapter supplies to be tested.

use std::sync::Arc;

use async_trait::async_trait;
use scriba_core::target::Target;

/// A store with a target in front of it, and a read model of keys and values. Every rule makes a bed of its own.
///
/// Methods panic on failure, which fails the test.
#[async_trait]
pub trait TargetBed: Sized + Send + Sync + 'static {
    /// What the target applies.
    type Op: Clone + Send + Sync + 'static;

    /// A bed with an empty store, ready to be used, which is not the store of any other bed.
    async fn new() -> Self;

    /// The target, opened anew, as another node would open it.
    async fn target(&self) -> Arc<dyn Target<Self::Op>>;

    /// Gives a key a value, whether it has one or not.
    fn write(&self, key: i64, value: i64) -> Self::Op;

    /// Adds to the value of a key; where it has none, to 0.
    fn add(&self, key: i64, value: i64) -> Self::Op;

    /// An operation that the store refuses for its data, which is a failure of the class integrity.
    fn refused(&self) -> Self::Op;

    /// An operation that fails for the schema, which is a failure of the class structural.
    fn failing(&self) -> Self::Op;

    /// All keys with their values, in the order of keys, as any reader sees them.
    async fn read(&self) -> Vec<(i64, i64)>;
}

/// The ability `statements`: a reset runs statements.
pub trait Statements: TargetBed {
    /// The statement that empties the read model.
    fn empties(&self) -> String;

    /// A statement that fails, as the second one of a reset.
    fn fails(&self) -> String;
}

/// The ability `hold`: a commit can be held up in its transaction.
#[async_trait]
pub trait Hold: TargetBed {
    /// What holds commits up.
    type Held: Send;

    /// From now on the commit of the operation waits in its transaction, after the checkpoint was moved.
    async fn hold(&self) -> (Self::Op, Self::Held);

    /// Lets it go on.
    async fn let_go(&self, held: Self::Held);
}
