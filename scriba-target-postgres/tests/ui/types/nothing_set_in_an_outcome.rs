use scriba_core::Outcome;
use scriba_target_postgres::{PgOp, Table};

#[derive(Table)]
#[table(name = "orders")]
struct OrderRow {
    #[table(key)]
    order_id: String,
    status: String,
    total: Option<i64>,
}

fn main() {
    let _: Outcome<PgOp> = OrderRow::update("o-1").into();
}
