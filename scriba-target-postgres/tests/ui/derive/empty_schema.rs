use scriba_target_postgres::Table;

#[derive(Table)]
#[table(name = "orders", schema = "")]
struct OrderRow {
    #[table(key)]
    order_id: String,
}

fn main() {}
