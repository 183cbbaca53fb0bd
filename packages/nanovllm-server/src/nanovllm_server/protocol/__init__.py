"""The API's contract as types: requests, responses and errors. JSON comes in and goes out; nothing is awaited."""
