use scriba_target_postgres::{OnConflict, Table};

#[derive(Table)]
#[table(name = "orders")]
struct OrderRow {
    #[table(key)]
    order_id: String,
    status: String,
    total: Option<i64>,
}

#[derive(Table)]
#[table(name = "lines")]
struct LineRow {
    #[table(key)]
    line_id: i64,
}

fn main() {
    let _ = LineRow { line_id: 5 }.upsert(OnConflict::<OrderRow>::nothing());
}
