//! Questions beside the subscription, on a connection of their own.

use async_trait::async_trait;
use scriba_core::source::{SourceError, SourceInspector};
use scriba_core::{EventId, Position};
use sqlx::postgres::PgConnection;
use sqlx::{query, query_scalar};

use crate::catalog::Catalog;
use crate::error::answer;
use crate::row::event_id;

pub(crate) struct Inspector {
    connection: PgConnection,
    catalog: Catalog,
}

impl Inspector {
    pub(crate) fn new(connection: PgConnection, catalog: Catalog) -> Self {
        Self { connection, catalog }
    }
}

#[async_trait]
impl SourceInspector for Inspector {
    async fn head(&mut self) -> Result<Option<Position>, SourceError> {
        let asked = query_scalar(self.catalog.texts.head.clone()).fetch_one(&mut self.connection);
        let head: Option<i64> = answer(&self.catalog.name, "read the head", asked).await?;
        head.map(Position::from_i64).transpose().map_err(SourceError::unusable)
    }

    async fn event_id_at(&mut self, position: Position) -> Result<Option<EventId>, SourceError> {
        let Ok(number) = position.to_i64() else { return Ok(None) };
        let asked = query(self.catalog.texts.id_at.clone()).bind(number).fetch_optional(&mut self.connection);
        match answer(&self.catalog.name, format!("read the event at position {position}"), asked).await? {
            Some(row) => event_id(&row, self.catalog.kinds.id),
            None => Ok(None),
        }
    }
}
