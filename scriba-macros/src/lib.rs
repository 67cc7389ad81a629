//! Derives for Scriba.
use proc_macro::TokenStream;
/// x
#[proc_macro_derive(Projection, attributes(projection))]
pub fn projection(_: TokenStream) -> TokenStream { TokenStream::new() }
/// x
#[proc_macro_derive(Events, attributes(event, events))]
pub fn events(_: TokenStream) -> TokenStream { TokenStream::new() }
/// x
#[proc_macro_derive(Table, attributes(table))]
pub fn table(_: TokenStream) -> TokenStream { TokenStream::new() }
