use scriba_target_postgres::Table;

#[derive(Table)]
#[table(name = "orders")]
struct OrderRow {
    #[table(key)]
    order_id: String,
    #[table(cast = "numeric")]
    total: i64,
}

fn main() {}
