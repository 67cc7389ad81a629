use scriba_target_postgres::{OnConflict, Table};

#[derive(Table)]
#[table(name = "orders")]
struct OrderRow {
    #[table(key)]
    order_id: String,
    status: String,
    total: Option<i64>,
}


fn main() {
    let _ = OnConflict::update(OrderRow::TOTAL).add(OrderRow::STATUS);
}
