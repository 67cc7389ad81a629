use scriba_target_postgres::sql;

fn main() {
    let _ = sql("delete from orders where total = $1").bind(5_u64);
}
