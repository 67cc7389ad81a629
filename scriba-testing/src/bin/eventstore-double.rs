//! The double of EventStoreDB, started by hand: for clients in other languages, and to try things.

use std::io;

use clap::Parser;
use scriba_testing::eventstore::EventStoreDouble;

/// A double of EventStoreDB and KurrentDB on loopback. It keeps everything in memory, until it is ended.
#[derive(Parser)]
struct Arguments {
    /// The port to listen on; 0 for any that is free.
    #[arg(long, default_value_t = 2113)]
    port: u16,
    /// The user that calls have to name; any or none is let in unless there is one.
    #[arg(long, requires = "password")]
    user: Option<String>,
    /// The user's password.
    #[arg(long, requires = "user")]
    password: Option<String>,
}

fn main() -> io::Result<()> {
    let arguments = Arguments::parse();
    let double = EventStoreDouble::start_on(arguments.port)?;
    if let (Some(user), Some(password)) = (arguments.user, arguments.password) {
        double.require_credentials(&user, &password);
    }
    println!("{}", double.connection_string());
    loop {
        std::thread::park();
    }
}
