use scriba_target_postgres::Table;

#[derive(Table)]
#[table(name = "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx")]
struct OrderRow {
    #[table(key)]
    order_id: String,
}

fn main() {}
