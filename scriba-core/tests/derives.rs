//! The derives of projections and events, as a program uses them.

use scriba_core::{EventId, EventType, Events, Position, Projection, ProjectionId, RecordedEvent, StreamId};
use serde::Deserialize;

#[derive(Projection)]
#[projection(name = "orders", version = 2)]
struct Orders;

#[derive(Projection)]
#[projection(name = "a projection with 'quotes', ünïcode and _v in it")]
struct Unusual;

#[derive(Projection)]
#[projection(name = "with_parameters")]
struct WithParameters<T, const N: usize>([T; N]);

#[test]
fn a_projection_has_the_name_and_version_it_says_and_version_1_otherwise() {
    assert_eq!(ProjectionId::of::<Orders>(), ProjectionId::new("orders", 2));
    assert_eq!(ProjectionId::of::<Unusual>(), ProjectionId::new("a projection with 'quotes', ünïcode and _v in it", 1));
    assert_eq!(ProjectionId::of::<WithParameters<String, 3>>(), ProjectionId::from("with_parameters"));
}

#[derive(Debug, PartialEq, Deserialize)]
struct OrderPlaced {
    order_id: String,
    #[serde(default)]
    cents: i64,
}

#[derive(Debug, PartialEq, Events)]
enum OrderEvent {
    OrderPlaced(OrderPlaced),
    #[event("order-shipped", alias = "OrderShippedV1", alias = "order.shipped")]
    OrderShipped(String),
    #[event(upcast = euros)]
    OrderPaid(OrderPlaced),
    Archived,
}

fn euros(event: &RecordedEvent) -> Result<OrderPlaced, String> {
    let text = std::str::from_utf8(&event.data).map_err(|error| error.to_string())?;
    let (order_id, euros) = text.split_once(' ').ok_or_else(|| format!("{text:?} is not an id and an amount"))?;
    let euros: i64 = euros.parse().map_err(|_| format!("{euros:?} is not an amount"))?;
    Ok(OrderPlaced { order_id: order_id.to_owned(), cents: euros * 100 })
}

fn event(event_type: &str, data: &[u8]) -> RecordedEvent {
    RecordedEvent {
        id: EventId::from("e-1"),
        stream_id: StreamId::from("order-1"),
        event_type: EventType::from(event_type),
        position: Position::new(0),
        revision: None,
        data: data.to_vec().into(),
        metadata: Vec::new().into(),
        occurred_at: None,
    }
}

fn decoded(event_type: &str, data: &[u8]) -> OrderEvent {
    OrderEvent::decode(&event(event_type, data)).expect("the body decodes")
}

fn refused(event_type: &str, data: &[u8]) -> String {
    OrderEvent::decode(&event(event_type, data)).expect_err("the body does not decode").to_string()
}

#[test]
fn the_types_listed_are_the_variants_names_or_what_they_say_and_all_aliases() {
    let types = ["OrderPlaced", "order-shipped", "OrderShippedV1", "order.shipped", "OrderPaid", "Archived"];
    assert_eq!(OrderEvent::event_types(), Some(types.as_slice()));
}

#[test]
fn a_body_is_decoded_into_the_type_of_the_variant_its_event_type_names() {
    let placed = OrderPlaced { order_id: "o-1".to_owned(), cents: 5 };
    assert_eq!(decoded("OrderPlaced", br#"{"cents":5,"order_id":"o-1"}"#), OrderEvent::OrderPlaced(placed));
    for event_type in ["order-shipped", "OrderShippedV1", "order.shipped"] {
        assert_eq!(decoded(event_type, br#""o-1""#), OrderEvent::OrderShipped("o-1".to_owned()));
    }
}

#[test]
fn an_upcast_reads_the_event_instead_of_the_plain_decoding_and_its_error_is_the_decode_error() {
    let paid = OrderPlaced { order_id: "o-1".to_owned(), cents: 700 };
    assert_eq!(decoded("OrderPaid", b"o-1 7"), OrderEvent::OrderPaid(paid));
    assert_eq!(refused("OrderPaid", b"o-1 x"), r#"event type "OrderPaid": "x" is not an amount"#);
}

#[test]
fn a_variant_without_a_body_takes_any_bytes() {
    for data in [b"".as_slice(), b"{}", b"\xff\x00"] {
        assert_eq!(decoded("Archived", data), OrderEvent::Archived);
    }
}

#[test]
fn bytes_that_are_not_the_body_are_refused_with_the_type_and_the_reason() {
    for (data, reason) in [
        (b"".as_slice(), "EOF while parsing a value"),
        (b"not json", "expected ident"),
        (b"\xff\xfe", "expected value"),
        (b"{\"order_id\":\"\xff\"}", "invalid unicode"),
        (b"{\"order_id\":\"a\0b\"}", "control character"),
        (b"[1]", "invalid type: integer"),
        (b"{}", "missing field `order_id`"),
        (b"{\"order_id\":1}", "invalid type: integer"),
        (b"{\"order_id\":\"o-1\"} x", "trailing characters"),
        ("[".repeat(1 << 20).as_bytes(), "invalid type: sequence"),
    ] {
        let refusal = refused("OrderPlaced", data);
        assert!(refusal.starts_with(r#"event type "OrderPlaced": "#) && refusal.contains(reason), "{refusal}");
    }
}

#[test]
fn a_type_that_is_not_listed_is_refused_even_where_it_differs_in_case_or_by_a_space() {
    for event_type in ["OrderShipped", "orderplaced", "OrderPlaced ", ""] {
        assert!(refused(event_type, b"{}").contains("not one of the event types"), "{event_type:?}");
    }
}

#[test]
fn a_type_is_compared_byte_by_byte_with_what_the_attribute_says() {
    #[derive(Debug, Events)]
    enum Unusual {
        #[event("größe\0 \"x\" {}")]
        Sized,
    }
    assert!(Unusual::decode(&event("größe\0 \"x\" {}", b"")).is_ok());
    assert!(Unusual::decode(&event("größe", b"")).is_err());
}

#[test]
fn an_enum_that_comes_out_of_a_macro_decodes_like_any_other() {
    macro_rules! events {
        ($body:ty, $upcast:path, $shipped:literal, $alias:expr) => {
            #[expect(clippy::enum_variant_names, reason = "the names are event types")]
            #[derive(Debug, PartialEq, Events)]
            enum FromMacro {
                OrderPlaced($body),
                #[event(upcast = $upcast)]
                OrderPaid(OrderPlaced),
                #[event($shipped, alias = $alias)]
                OrderShipped(String),
            }
        };
    }
    events!(OrderPlaced, euros, "order-shipped", "OrderShippedV1");
    for event_type in ["order-shipped", "OrderShippedV1"] {
        let shipped = FromMacro::decode(&event(event_type, br#""o-1""#));
        assert_eq!(shipped.ok(), Some(FromMacro::OrderShipped("o-1".to_owned())));
    }
    let paid = OrderPlaced { order_id: "o-1".to_owned(), cents: 100 };
    assert_eq!(FromMacro::decode(&event("OrderPaid", b"o-1 1")).ok(), Some(FromMacro::OrderPaid(paid)));
}
