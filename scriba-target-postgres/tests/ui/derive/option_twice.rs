use scriba_target_postgres::Table;

#[derive(Table)]
#[table(name = "orders", name = "orders")]
struct OrderRow {
    #[table(key)]
    order_id: String,
}

fn main() {}
