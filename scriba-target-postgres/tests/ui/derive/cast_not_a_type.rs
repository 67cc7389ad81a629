use scriba_target_postgres::Table;

#[derive(Table)]
#[table(name = "orders")]
struct OrderRow {
    #[table(key)]
    order_id: String,
    #[table(cast = "text; drop table orders")]
    total: String,
}

fn main() {}
