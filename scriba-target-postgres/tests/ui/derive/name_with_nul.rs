use scriba_target_postgres::Table;

#[derive(Table)]
#[table(name = "or\0ders")]
struct OrderRow {
    #[table(key)]
    order_id: String,
}

fn main() {}
