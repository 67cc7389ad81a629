use scriba_target_postgres::Table;

#[derive(Table)]
#[table(name = "public.orders")]
struct OrderRow {
    #[table(key)]
    order_id: String,
}

fn main() {}
