//! The derives in a program that depends on the crates under other names, and reaches one through a module of its own.

use engine::{EventId, EventType, Events, Position, Projection, RecordedEvent, StreamId};
use postgres::Table;
use serde::Deserialize;

mod facade {
    pub(crate) use postgres as target;
}

#[derive(Projection)]
#[projection(name = "orders", crate = "engine")]
struct Orders;

#[derive(Deserialize)]
struct OrderPlaced {
    order_id: String,
}

#[derive(Events)]
#[events(crate = "::engine")]
enum OrderEvent {
    OrderPlaced(OrderPlaced),
    Archived,
}

#[derive(Table)]
#[table(name = "orders", crate = "crate::facade::target")]
struct OrderRow {
    #[table(key)]
    order_id: String,
    #[table(cast = "order_status")]
    status: Option<String>,
}

#[test]
fn all_three_derives_work_under_other_names() {
    assert_eq!(Orders::NAME, "orders");
    let event = RecordedEvent {
        id: EventId::from("e-1"),
        stream_id: StreamId::from("order-1"),
        event_type: EventType::from("OrderPlaced"),
        position: Position::new(0),
        revision: None,
        data: r#"{"order_id":"o-1"}"#.into(),
        metadata: "".into(),
        occurred_at: None,
    };
    let Ok(OrderEvent::OrderPlaced(placed)) = OrderEvent::decode(&event) else { panic!("not decoded") };
    let row = OrderRow { order_id: placed.order_id, status: None };
    assert_eq!(OrderRow::META.name, "orders");
    assert_eq!(row.into_values().len(), 2);
    assert!(matches!(
        OrderEvent::decode(&RecordedEvent { event_type: "Archived".into(), ..event }),
        Ok(OrderEvent::Archived)
    ));
}
