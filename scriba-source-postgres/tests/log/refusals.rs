//! What cannot be read without losing events is refused, with the remedy.

use scriba_core::Source;
use scriba_core::source::SourceError;
use scriba_source_postgres::PgLog;

use crate::bed::{APPEND, Bed, DEMAND, Reader};

/// The refusal names each of these.
fn names(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
}

#[tokio::test]
async fn sequences_that_prove_nothing_are_refused_with_the_remedy_and_work_after_it() {
    let bed = Bed::new().await;
    for (set, parts, mend) in [
        ("cache 20", ["CACHE 20", "ALTER SEQUENCE events_position_seq CACHE 1"], "cache 1"),
        ("cycle", ["cycles", "ALTER SEQUENCE events_position_seq NO CYCLE"], "no cycle"),
        ("increment -1 minvalue 1 maxvalue 9 restart 9", ["INCREMENT -1", "ALTER SEQUENCE"], "increment 1 no maxvalue"),
    ] {
        bed.run(&format!("alter sequence events_position_seq {set}")).await;
        names(&bed.refused(bed.log()).await, &parts);
        let subscribed = Reader::start(&bed.log(), None, None).await.map(drop);
        assert!(matches!(subscribed, Err(SourceError::Unusable { .. })), "{subscribed:?}");
        bed.run(&format!("alter sequence events_position_seq {mend}")).await;
        bed.log().check().await.unwrap();
    }
    bed.run("alter sequence events_position_seq owned by none; create unlogged table u (position bigserial primary key, id int not null, stream_id text not null, type text not null, data json)").await;
    names(&bed.refused(PgLog::new(bed.pool.clone(), "u")).await, &["unlogged", "SET LOGGED"]);
}

#[tokio::test]
async fn a_position_without_a_sequence_is_refused() {
    let bed = Bed::new().await;
    bed.run("alter table events alter position drop default").await;
    bed.run("drop sequence events_position_seq").await;
    names(&bed.refused(bed.log()).await, &["\"position\"", "no sequence", "PgLog::sequence"]);
    names(&bed.refused(bed.log().sequence("nowhere")).await, &["no sequence nowhere"]);
    names(&bed.refused(bed.log().sequence("events")).await, &["events is no sequence"]);
    bed.run("create sequence a; create sequence b; alter table events alter position set default nextval('a') + nextval('b')").await;
    names(&bed.refused(bed.log()).await, &["several sequences (a, b)", "PgLog::sequence"]);
}

#[tokio::test]
async fn tables_and_columns_that_are_not_there_or_not_fit_are_named() {
    let bed = Bed::new().await;
    names(&bed.refused(PgLog::new(bed.pool.clone(), "Events")).await, &["\"Events\"", "no such table", "case matters"]);
    names(&bed.refused(bed.log().schema("nowhere")).await, &["\"nowhere\".\"events\"", "no such table"]);
    names(
        &bed.refused(bed.log().data_column("body")).await,
        &["no column \"body\"", "position, id, stream_id, type, data"],
    );
    names(
        &bed.refused(bed.log().data_column("id")).await,
        &["\"id\" is of type uuid", "json, jsonb, text, character varying, bytea"],
    );
    bed.run("alter table events add at timestamp, add number numeric, add maybe bigint default 1").await;
    names(
        &bed.refused(bed.log().occurred_at_column("at")).await,
        &["timestamp without time zone", "timestamp with time zone"],
    );
    names(&bed.refused(bed.log().position_column("number")).await, &["numeric", "bigint, integer"]);
    names(&bed.refused(bed.log().position_column("maybe")).await, &["may be NULL", "SET NOT NULL"]);
    bed.run("create view v as select * from events").await;
    names(
        &bed.refused(PgLog::new(bed.pool.clone(), "v")).await,
        &["a view", "name the table that events are inserted into"],
    );
}

#[tokio::test]
async fn a_target_of_logical_replication_is_refused_also_where_only_a_partition_is_one() {
    let bed = Bed::with("create table events (position bigserial primary key, id int not null, stream_id text not null, type text not null, data json) partition by range (position);
        create table leaf partition of events default").await;
    bed.log().check().await.unwrap();
    bed.run("insert into pg_subscription_rel (srsubid, srrelid, srsubstate) values (1, 'leaf'::regclass, 'r')").await;
    names(&bed.refused(bed.log()).await, &["logical replication", "publisher"]);
}

#[tokio::test]
async fn an_event_with_a_null_where_something_is_needed_ends_the_projection_by_name() {
    let bed = Bed::new().await;
    bed.run("alter table events alter stream_id drop not null; insert into events (stream_id) values (null)").await;
    let mut reader = bed.read().await;
    let Err(SourceError::Unusable { message }) = reader.subscription.next(DEMAND).await else { panic!() };
    names(&message, &["position 1", "NULL in column \"stream_id\""]);
}

#[tokio::test]
async fn a_table_dropped_or_renamed_while_reading_is_unusable_and_a_killed_connection_is_not() {
    let bed = Bed::new().await;
    bed.run(APPEND).await;
    let mut reader = bed.read().await;
    reader.until(1).await;
    bed.run("select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and application_name = 'scriba reader v1'").await;
    let killed = reader.subscription.next(DEMAND).await.map(drop);
    assert!(matches!(killed, Err(SourceError::Unavailable { .. })), "{killed:?}");
    let mut reader = bed.read().await;
    reader.until(1).await;
    bed.run("alter table events rename to gone").await;
    let Err(SourceError::Unusable { message }) = reader.subscription.next(DEMAND).await else { panic!() };
    names(&message, &["42P01", "name the table"]);
}

#[tokio::test]
async fn a_wrong_database_or_user_is_unusable_and_a_server_that_is_not_there_is_unavailable() {
    let bed = Bed::new().await;
    let with = |options| PgLog::new(sqlx::PgPool::connect_lazy_with(options), "events");
    names(
        &bed.refused(with(bed.database.connect_options().database("nowhere"))).await,
        &["3D000", "correct the database"],
    );
    names(
        &bed.refused(with(bed.database.connect_options().username("nobody_at_all"))).await,
        &["28000", "correct the user"],
    );
    let nowhere = with(bed.database.connect_options().port(1)).check().await;
    assert!(matches!(nowhere, Err(SourceError::Unavailable { .. })), "{nowhere:?}");
}

#[tokio::test]
async fn a_role_without_rights_on_the_table_is_told_which() {
    let bed = Bed::new().await;
    let role = format!("nothing_{}", bed.database.name());
    bed.run(&format!("create role \"{role}\" login")).await;
    let log = PgLog::new(sqlx::PgPool::connect_lazy_with(bed.database.connect_options().username(&role)), "events");
    names(&bed.refused(log).await, &["42501", "grant USAGE on the schema and SELECT on the table"]);
    bed.run(&format!("drop role \"{role}\"")).await;
}
