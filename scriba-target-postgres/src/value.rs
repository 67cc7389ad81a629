//! Values on their way into columns.

use std::cmp::Ordering;
use std::hash::{Hash, Hasher};

use chrono::{DateTime, NaiveDate, SubsecRound, Utc};
use uuid::Uuid;

use crate::table::ValueKind;

/// A value of a column, with NULL as a variant of its own.
///
/// Values are equal where Postgres takes them for one key: 0.0 and -0.0 are one, as are all NaN, and timestamps count
/// microseconds. Their order is total, NULL first.
#[derive(Clone, Debug)]
pub enum Value {
    /// SQL NULL.
    Null,
    /// `boolean`.
    Bool(bool),
    /// `smallint`.
    I16(i16),
    /// `integer`.
    I32(i32),
    /// `bigint`.
    I64(i64),
    /// `real`.
    F32(f32),
    /// `double precision`.
    F64(f64),
    /// `text`; also what travels as text: json, enums, numeric, arrays.
    Text(String),
    /// `bytea`.
    Bytes(Vec<u8>),
    /// `uuid`.
    Uuid(Uuid),
    /// `date`.
    Date(NaiveDate),
    /// `timestamptz`.
    Timestamp(DateTime<Utc>),
}

impl Value {
    /// The type as which it travels; `None` for NULL.
    pub fn kind(&self) -> Option<ValueKind> {
        Some(match self {
            Self::Null => return None,
            Self::Bool(_) => ValueKind::Bool,
            Self::I16(_) => ValueKind::I16,
            Self::I32(_) => ValueKind::I32,
            Self::I64(_) => ValueKind::I64,
            Self::F32(_) => ValueKind::F32,
            Self::F64(_) => ValueKind::F64,
            Self::Text(_) => ValueKind::Text,
            Self::Bytes(_) => ValueKind::Bytes,
            Self::Uuid(_) => ValueKind::Uuid,
            Self::Date(_) => ValueKind::Date,
            Self::Timestamp(_) => ValueKind::Timestamp,
        })
    }

    /// Bytes it takes up in memory, those it points to included.
    pub fn size(&self) -> usize {
        let pointed_to = match self {
            Self::Text(text) => text.len(),
            Self::Bytes(bytes) => bytes.len(),
            _ => 0,
        };
        size_of::<Self>() + pointed_to
    }
}

/// A float that compares by `total_cmp` as Postgres compares it.
fn comparable(float: f64) -> f64 {
    if float.is_nan() { f64::NAN } else { float + 0.0 }
}

impl Ord for Value {
    fn cmp(&self, other: &Self) -> Ordering {
        match (self, other) {
            (Self::Bool(a), Self::Bool(b)) => a.cmp(b),
            (Self::I16(a), Self::I16(b)) => a.cmp(b),
            (Self::I32(a), Self::I32(b)) => a.cmp(b),
            (Self::I64(a), Self::I64(b)) => a.cmp(b),
            (Self::F32(a), Self::F32(b)) => comparable((*a).into()).total_cmp(&comparable((*b).into())),
            (Self::F64(a), Self::F64(b)) => comparable(*a).total_cmp(&comparable(*b)),
            (Self::Text(a), Self::Text(b)) => a.cmp(b),
            (Self::Bytes(a), Self::Bytes(b)) => a.cmp(b),
            (Self::Uuid(a), Self::Uuid(b)) => a.cmp(b),
            (Self::Date(a), Self::Date(b)) => a.cmp(b),
            (Self::Timestamp(a), Self::Timestamp(b)) => a.timestamp_micros().cmp(&b.timestamp_micros()),
            _ => self.kind().cmp(&other.kind()),
        }
    }
}

impl PartialOrd for Value {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Value {}

impl Hash for Value {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.kind().hash(state);
        match self {
            Self::Null => {}
            Self::Bool(value) => value.hash(state),
            Self::I16(value) => value.hash(state),
            Self::I32(value) => value.hash(state),
            Self::I64(value) => value.hash(state),
            Self::F32(value) => comparable((*value).into()).to_bits().hash(state),
            Self::F64(value) => comparable(*value).to_bits().hash(state),
            Self::Text(value) => value.hash(state),
            Self::Bytes(value) => value.hash(state),
            Self::Uuid(value) => value.hash(state),
            Self::Date(value) => value.hash(state),
            Self::Timestamp(value) => value.timestamp_micros().hash(state),
        }
    }
}

/// A type whose values go into columns, and how they travel.
///
/// | type | travels as |
/// |---|---|
/// | `bool` | `boolean` |
/// | `i16`; `i32` and `u16`; `i64` and `u32` | `smallint`; `integer`; `bigint` |
/// | `f32`, `f64` | `real`, `double precision` |
/// | `String`, `&str` | `text` |
/// | `Vec<u8>` | `bytea` |
/// | [`Uuid`] | `uuid` |
/// | [`NaiveDate`] | `date` |
/// | [`DateTime<Utc>`] | `timestamptz`, cut down to microseconds, which is what Postgres keeps |
/// | [`serde_json::Value`] | `text`, cast to `jsonb` |
/// | `Option<T>` | as `T`, or NULL |
///
/// Types of one's own travel as one of these:
///
/// ```
/// use scriba_target_postgres::{PgValue, Value, ValueKind};
///
/// enum Status { Placed, Shipped }
///
/// impl PgValue for Status {
///     const KIND: ValueKind = ValueKind::Text;
///     const CAST: Option<&'static str> = Some("order_status");
///
///     fn into_value(self) -> Value {
///         Value::Text(match self { Self::Placed => "placed", Self::Shipped => "shipped" }.to_owned())
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a value of a Postgres column",
    label = "no `PgValue`",
    note = "write bool, i16, i32, i64, u16, u32, f32, f64, String, Vec<u8>, Uuid, NaiveDate, DateTime<Utc>, serde_json::Value, or an \
            Option of one of them",
    note = "for a type of your own implement `scriba_target_postgres::PgValue`; what these cannot hold (u64, decimals, lists) goes \
            as a String with `#[table(cast = \"…\")]`"
)]
pub trait PgValue {
    /// The type as which its values travel.
    const KIND: ValueKind;

    /// The name of the SQL type they are cast to on arrival, where a column of that type does not take what travels.
    const CAST: Option<&'static str> = None;

    /// Whether a value may be [`Value::Null`]. Such a type is no part of a key.
    const NULLABLE: bool = false;

    /// The value: of the variant that [`PgValue::KIND`] names, or [`Value::Null`] where [`PgValue::NULLABLE`] says so.
    fn into_value(self) -> Value;
}

macro_rules! values {
    ($($type:ty, $kind:ident, $value:pat => $converted:expr;)*) => {$(
        impl PgValue for $type {
            const KIND: ValueKind = ValueKind::$kind;

            fn into_value(self) -> Value {
                let $value = self;
                Value::$kind($converted)
            }
        }
    )*};
}

values! {
    bool, Bool, value => value;
    i16, I16, value => value;
    i32, I32, value => value;
    u16, I32, value => value.into();
    i64, I64, value => value;
    u32, I64, value => value.into();
    f32, F32, value => value;
    f64, F64, value => value;
    String, Text, value => value;
    &str, Text, value => value.to_owned();
    Vec<u8>, Bytes, value => value;
    Uuid, Uuid, value => value;
    NaiveDate, Date, value => value;
    DateTime<Utc>, Timestamp, value => value.trunc_subsecs(6);
}

impl PgValue for serde_json::Value {
    const KIND: ValueKind = ValueKind::Text;
    const CAST: Option<&'static str> = Some("jsonb");

    fn into_value(self) -> Value {
        Value::Text(self.to_string())
    }
}

impl<T: PgValue> PgValue for Option<T> {
    const KIND: ValueKind = T::KIND;
    const CAST: Option<&'static str> = T::CAST;
    const NULLABLE: bool = true;

    fn into_value(self) -> Value {
        self.map_or(Value::Null, T::into_value)
    }
}

/// A number, to which an amount can be added where it stands.
#[diagnostic::on_unimplemented(
    message = "nothing can be added to a column of type `{Self}`",
    label = "not a number",
    note = "`add` is for columns of i16, i32, i64, u16, u32, f32, f64 or an Option of one of them: use `set` here"
)]
pub trait Number: PgValue {
    /// What is added: signed, so that it also takes away.
    type Amount: PgValue;
}

macro_rules! numbers {
    ($($type:ty => $amount:ty),*) => {$(
        impl Number for $type {
            type Amount = $amount;
        }
    )*};
}

numbers!(i16 => i16, i32 => i32, u16 => i32, i64 => i64, u32 => i64, f32 => f32, f64 => f64);

/// Adding to NULL leaves NULL, as in SQL.
impl<T: Number> Number for Option<T> {
    type Amount = T::Amount;
}

/// What stands for a value of a column of type `V`: a `V` itself, `&str` for a `String`, and either for an `Option` of it.
#[diagnostic::on_unimplemented(
    message = "a column of type `{V}` does not take a `{Self}`",
    label = "not a `{V}`",
    note = "write a value of the type that the field of the row has"
)]
pub trait IntoColumn<V> {
    /// The value.
    fn into_column(self) -> V;
}

impl<V> IntoColumn<V> for V {
    fn into_column(self) -> V {
        self
    }
}

impl<V> IntoColumn<Option<V>> for V {
    fn into_column(self) -> Option<V> {
        Some(self)
    }
}

impl IntoColumn<String> for &str {
    fn into_column(self) -> String {
        self.to_owned()
    }
}

impl IntoColumn<Option<String>> for &str {
    fn into_column(self) -> Option<String> {
        Some(self.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use std::hash::{BuildHasher, RandomState};

    use super::*;

    fn at(nanoseconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp_nanos(nanoseconds)
    }

    #[test]
    fn values_that_are_one_key_to_postgres_are_equal_and_hash_alike() {
        let hasher = RandomState::new();
        let other_nan = f64::from_bits(f64::NAN.to_bits() | 1);
        for (a, b) in [
            (Value::F64(0.0), Value::F64(-0.0)),
            (Value::F64(f64::NAN), Value::F64(-other_nan)),
            (Value::F32(0.0), Value::F32(-0.0)),
            (Value::F32(f32::NAN), Value::F32(-f32::NAN)),
            (Value::Timestamp(at(1_000)), Value::Timestamp(at(1_999))),
            (at(-1_001).into_value(), at(-2_000).into_value()),
            (Value::Null, Value::Null),
        ] {
            assert_eq!(a, b);
            assert_eq!(hasher.hash_one(&a), hasher.hash_one(&b), "{a:?} {b:?}");
        }
    }

    #[test]
    fn the_order_is_total_with_null_first_and_not_a_number_last_among_its_kind() {
        let ascending = [
            Value::Null,
            Value::Bool(false),
            Value::Bool(true),
            Value::I16(-1),
            Value::I16(1),
            Value::I32(-1),
            Value::I64(i64::MIN),
            Value::I64(i64::MAX),
            Value::F32(f32::NEG_INFINITY),
            Value::F32(f32::NAN),
            Value::F64(-1.5),
            Value::F64(0.0),
            Value::F64(f64::INFINITY),
            Value::F64(-f64::NAN),
            Value::Text(String::new()),
            Value::Text("B".to_owned()),
            Value::Text("a".to_owned()),
            Value::Bytes(vec![0]),
            Value::Bytes(vec![0, 0]),
            Value::Uuid(Uuid::nil()),
            Value::Uuid(Uuid::max()),
            Value::Date(NaiveDate::MIN),
            Value::Date(NaiveDate::MAX),
            Value::Timestamp(at(-1_000)),
            Value::Timestamp(at(1_000)),
        ];
        for (i, a) in ascending.iter().enumerate() {
            for (j, b) in ascending.iter().enumerate() {
                assert_eq!(a.cmp(b), i.cmp(&j), "{a:?} {b:?}");
                assert_eq!(a == b, i == j, "{a:?} {b:?}");
            }
        }
    }

    #[test]
    fn a_timestamp_travels_as_the_microseconds_that_postgres_keeps() {
        let Value::Timestamp(time) = at(-1_001).into_value() else { panic!("not a timestamp") };
        assert_eq!(time, at(-2_000));
    }

    #[test]
    fn unsigned_numbers_travel_in_the_next_wider_type_and_json_as_text() {
        assert_eq!(u16::MAX.into_value(), Value::I32(65_535));
        assert_eq!(u32::MAX.into_value(), Value::I64(4_294_967_295));
        assert_eq!(serde_json::json!({"a": [1, null]}).into_value(), Value::Text(r#"{"a":[1,null]}"#.to_owned()));
        assert_eq!(<Option<serde_json::Value> as PgValue>::CAST, Some("jsonb"));
        assert_eq!(None::<i64>.into_value(), Value::Null);
        assert_eq!(Some(7_i64).into_value(), Value::I64(7));
    }

    #[test]
    fn the_size_counts_what_texts_and_bytes_point_to() {
        let fixed = Value::Null.size();
        assert_eq!(Value::I64(1).size(), fixed);
        assert_eq!(Value::Text("x".repeat(1_000)).size(), fixed + 1_000);
        assert_eq!(Value::Bytes(vec![0; 7]).size(), fixed + 7);
    }
}
