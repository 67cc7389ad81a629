//! The derives of Scriba. Users reach them through the crates whose traits they implement:
//! `scriba_core::{Projection, Events}` and `scriba_target_postgres::Table`.

use proc_macro::TokenStream;
use syn::{DeriveInput, parse_macro_input};

mod events;
mod options;
mod projection;
mod table;

/// Gives a projection its identity.
///
/// `#[projection(…)]` takes
/// - `name = "orders"`, required: the name, without the version in it, at most 200 bytes;
/// - `version = 2`: the version, from 1 on; 1 where nothing is said;
/// - `crate = "path"`: where `scriba_core` is found, for programs that depend on it under another name.
///
/// ```
/// use scriba_core::Projection;
///
/// #[derive(Projection)]
/// #[projection(name = "orders", version = 2)]
/// struct Orders;
///
/// assert_eq!((Orders::NAME, Orders::VERSION), ("orders", 2));
/// ```
#[proc_macro_derive(Projection, attributes(projection))]
pub fn projection(input: TokenStream) -> TokenStream {
    expand(projection::derive(&parse_macro_input!(input as DeriveInput)))
}

/// Decodes events into an enum by their type; events of other types are not delivered.
///
/// Each variant holds one field, the body, which is read as JSON by serde straight from the recorded bytes; a variant
/// without fields ignores the body. The event type is the variant's name unless `#[event(…)]` on the variant
/// says otherwise:
/// - `"order-placed"`: the event type;
/// - `alias = "OrderPlacedV1"`: another event type of the same shape; may be given several times;
/// - `upcast = path`: a function that makes the body of an old shape the new one, instead of the plain decoding:
///   `fn(&RecordedEvent) -> Result<Body, E>` where `E: Display`.
///
/// On the enum, `#[events(crate = "path")]` says where `scriba_core` is found, for programs that depend on it under another
/// name.
///
/// ```
/// use scriba_core::{Events, RecordedEvent};
/// use serde::Deserialize;
///
/// #[derive(Deserialize)]
/// struct OrderPlaced { order_id: String, cents: i64 }
///
/// #[derive(Deserialize)]
/// struct OrderShipped { order_id: String }
///
/// #[derive(Events)]
/// enum OrderEvent {
///     #[event("order-placed", alias = "OrderPlaced", upcast = euros_to_cents)]
///     OrderPlaced(OrderPlaced),
///     OrderShipped(OrderShipped),
///     AllOrdersArchived,
/// }
///
/// /// `OrderPlaced` counted in euros, `order-placed` counts in cents.
/// fn euros_to_cents(event: &RecordedEvent) -> Result<OrderPlaced, serde_json::Error> {
///     let mut placed: OrderPlaced = serde_json::from_slice(&event.data)?;
///     if event.event_type == "OrderPlaced" {
///         placed.cents *= 100;
///     }
///     Ok(placed)
/// }
///
/// assert_eq!(
///     OrderEvent::event_types(),
///     Some(["order-placed", "OrderPlaced", "OrderShipped", "AllOrdersArchived"].as_slice()),
/// );
/// ```
#[proc_macro_derive(Events, attributes(event, events))]
pub fn events(input: TokenStream) -> TokenStream {
    expand(events::derive(&parse_macro_input!(input as DeriveInput)))
}

/// Describes a table by the struct of its rows: one field per column, at most 128.
///
/// For each field there is a constant named after it, `OrderRow::STATUS` for `status`: the column, with the type of its
/// values.
///
/// On the struct, `#[table(…)]` takes
/// - `name = "orders"`, required: the table;
/// - `schema = "public"`: its schema; the search path decides where nothing is said;
/// - `crate = "path"`: where `scriba_target_postgres` is found, for programs that depend on it under another name.
///
/// On fields:
/// - `key`: a column of the key, by which rows are updated, deleted and found in conflict; at least one. The table needs a
///   primary key or a unique constraint over just these columns;
/// - `column = "x"`: the column's name, where it is not the field's;
/// - `cast = "order_status"`: the SQL type that text is cast to, where the column is of an enum, `numeric` or another type
///   that text cannot be assigned to.
///
/// ```
/// use scriba_target_postgres::{PgOp, Table};
///
/// #[derive(Table)]
/// #[table(name = "orders", schema = "sales")]
/// struct OrderRow {
///     #[table(key)]
///     order_id: String,
///     #[table(cast = "order_status")]
///     status: String,
///     #[table(column = "total_cents")]
///     total: i64,
/// }
///
/// let row = OrderRow { order_id: "o-1".into(), status: "placed".into(), total: 1_250 };
/// let placed: PgOp = row.insert().into();
/// let shipped: PgOp = OrderRow::update("o-1").set(OrderRow::STATUS, "shipped").into();
/// let discounted: PgOp = OrderRow::update("o-1").add(OrderRow::TOTAL, -250).into();
/// ```
#[proc_macro_derive(Table, attributes(table))]
pub fn table(input: TokenStream) -> TokenStream {
    expand(table::derive(&parse_macro_input!(input as DeriveInput)))
}

/// A span that shows where the user wrote something, with names that mean what they mean in the derive: the user's code may
/// itself come out of a macro, where `self` is another one.
fn at(user: proc_macro2::Span) -> proc_macro2::Span {
    proc_macro2::Span::call_site().located_at(user)
}

fn expand(result: syn::Result<proc_macro2::TokenStream>) -> TokenStream {
    result.unwrap_or_else(syn::Error::into_compile_error).into()
}
