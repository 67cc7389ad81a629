use scriba_target_postgres::Table;

#[derive(Table)]
#[table(name = "orders")]
struct OrderRow {
    #[table(key)]
    order_id: String,
    total: u64,
}

fn main() {}
