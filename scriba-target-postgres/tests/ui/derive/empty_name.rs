use scriba_target_postgres::Table;

#[derive(Table)]
#[table(name = "")]
struct OrderRow {
    #[table(key)]
    order_id: String,
}

fn main() {}
