"""The front: routes, the relay, and the wire forms of OpenAI's API."""
